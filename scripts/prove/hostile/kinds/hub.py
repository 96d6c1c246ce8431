"""What a hub answers, or somebody who says that he is one."""

from __future__ import annotations

import json
import random
import shutil
import time
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.prove.hostile.attempt import Attempt
from scripts.prove.hostile.commands import command, read_by
from scripts.prove.hostile.kinds.hostile_hub import Answer, HostileHub, Tamper
from scripts.prove.hostile.values import deep, draw, many_digits, words
from scripts.prove.hostile.workshop import Place, Workshop
from tests.hub.hub_server import log_in

TOKEN, REPO = "hf_alicealicealice", "alice/heads"
SIDECAR, WEIGHTS = "medusa_heads.json", "medusa_lm_head.safetensors"
STATUSES = (*range(400, 406), *range(408, 411), 412, 416, 418, 422, 429, *range(500, 505), 508, 599)


class Hub:
    """Asked by `medusa-heads pull`, and what came is read."""

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        self._hub = HostileHub({TOKEN: "alice"})
        self._hub.__enter__()
        folder = workshop.heads(vocab_matrix="shared")
        self._files = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }

    def draw(self, rng: random.Random, place: Place) -> Attempt:
        """One conversation with the hub."""
        make = draw(
            rng,
            [
                (10, self._sound), (20, self._status), (20, self._listing), (25, self._bodies),
                (10, self._redirects), (10, self._headers), (5, self._names),
            ],
        )  # fmt: skip
        return make(rng, place)

    def _attempt(
        self,
        label: str,
        expect: Any,
        place: Place,
        tamper: Tamper | None = None,
        *,
        files: dict[str, bytes] | None = None,
        by_command: bool = False,
    ) -> Attempt:
        own = {**self._files} if files is None else files

        def conversation() -> int:
            from medusa_heads.checkpoint.stored_heads import read_stored
            from medusa_heads.hub.pull import pull

            monkeypatch = pytest.MonkeyPatch()
            cache = self._workshop.root / "caches" / "hub"
            try:
                log_in(self._hub, TOKEN, cache, monkeypatch)
                # The client waits longer after each failure: here nothing gets better by waiting.
                still = SimpleNamespace(**{**vars(time), "sleep": lambda _: None})
                monkeypatch.setattr("huggingface_hub.utils._http.time", still)
                self._hub.repositories.clear()
                self._hub.upload(REPO, own)
                if tamper is not None:
                    self._hub.tamper = tamper
                if by_command:
                    return command("pull", [REPO, "--out", str(place.out)])()
                return read_by(lambda: read_stored(pull(REPO, place.out)), [])()
            finally:
                self._hub.tamper = lambda method, path, answer: answer
                monkeypatch.undo()
                shutil.rmtree(cache, ignore_errors=True)

        def right() -> bool:
            got = {
                str(p.relative_to(place.out)): p.read_bytes()
                for p in place.out.rglob("*")
                if p.is_file()
            }
            return (
                got == {name: data for name, data in self._files.items() if name in got}
                and SIDECAR in got
            )

        return Attempt(label, expect, conversation, (REPO, SIDECAR, WEIGHTS, "out"), right)

    def _sound(self, rng: random.Random, place: Place) -> Attempt:
        evil = {f"{'../' * rng.randint(1, 6)}outside/evil.json": b"1",
            "custom_generate/evil.py": b"1",
                "pickle.pt": b"1", str(place.outside / "evil.json"): b"1",
                "adapter/../../evil.json": b"1"}  # fmt: skip
        delay = rng.choice([0, 0, 0.05])

        def slow(method: str, path: str, answer: Answer) -> Answer:
            time.sleep(delay)
            return answer

        return self._attempt(
            "good", "good", place, slow, files=self._files | evil, by_command=rng.random() < 0.3
        )

    def _status(self, rng: random.Random, place: Place) -> Attempt:
        status, what = rng.choice(STATUSES), rng.choice(["/api/", "/resolve/", SIDECAR, ""])
        body = rng.choice([b"", b"<html>\n<body>no</body>", b"{", b'{"error": "no"}',
            b'{"error": 5}', b"[]",
                           b'{"error": ["a"]}', b'{"errors": [{"message": 5}]}', b"\xff\xfe",
                           deep(9000).encode()])  # fmt: skip
        headers = rng.choice(
            [{}, {"X-Error-Message": words(rng)}, {"X-Error-Message": TOKEN},
                {"X-Error-Code": "GatedRepo"},
             {"X-Error-Code": "RepoNotFound"}, {"X-Error-Code": "RevisionNotFound"},
             {"X-Error-Code": "x"},
             {"X-Error-Message": "a" * 3000}, {"Retry-After": "x"},
             {"X-Error-Code": "EntryNotFound"},
             {"Content-Type": "application/json"}]
        )  # fmt: skip

        def tamper(method: str, path: str, answer: Answer) -> Answer:
            if what not in path:
                return answer
            return status, body, {"Content-Length": str(len(body)), **headers}

        return self._attempt(f"status {status} for {what or 'all'}", "bad", place, tamper)

    def _listing(self, rng: random.Random, place: Place) -> Attempt:
        """What is said to be in the repository."""
        sha = "0" * 40
        texts: list[Any] = [
            b"", b"{", b"[]", b"null", b"7", b'"x"', b"\xff", deep(9000).encode(),
            many_digits(rng).encode(), {},
            {"id": REPO}, {"id": REPO, "sha": sha, "siblings": 5},
            {"id": REPO, "sha": sha, "siblings": None},
            {"id": REPO, "sha": sha, "siblings": [5]}, {"id": REPO, "sha": sha, "siblings": [{}]},
            {"id": REPO, "sha": sha, "siblings": [{"rfilename": rng.choice([5, None, [], {}])}]},
            {"id": REPO, "sha": sha, "siblings": [{"rfilename": "config.json"}]},
            {"id": REPO,
                "sha": rng.choice([None, 5, [], "", "../" * 5 + "outside/evil",
                    str(place.outside / "evil")]),
             "siblings": [{"rfilename": SIDECAR}, {"rfilename": WEIGHTS}]},
            {"id": REPO, "sha": sha, "siblings": []}, {"error": words(rng)}, [{"id": REPO}],
            {"id": REPO, "sha": sha, "siblings": [{"rfilename": SIDECAR}],
                "createdAt": "yesterday"},
            {"id": REPO, "sha": sha,
                "siblings": [{"rfilename": SIDECAR, "lfs": rng.choice([5, {}, []])}]},
            {"id": REPO, "sha": sha, "siblings": [{"rfilename": SIDECAR}], "cardData": 5,
                "safetensors": [1]},
        ]  # fmt: skip
        text = rng.choice(texts)
        body = text if isinstance(text, bytes) else json.dumps(text).encode()

        def tamper(method: str, path: str, answer: Answer) -> Answer:
            if "/api/" not in path:
                return answer
            return 200, body, {"Content-Length": str(len(body)), "Content-Type": "application/json"}

        return self._attempt(f"listing {body[:30]!r}", "bad", place, tamper)

    def _bodies(self, rng: random.Random, place: Place) -> Attempt:
        """Files that are not what they were."""
        name = rng.choice([SIDECAR, WEIGHTS])
        case = rng.choice(
            ["cut off", "changed", "empty", "another", "hash", "longer", "html", "chunked wrong"]
        )

        def tamper(method: str, path: str, answer: Answer) -> Answer:
            status, data, said = answer
            if not path.endswith(name) or status != 200:
                return answer
            half = data[: len(data) // 2]
            if case == "cut off":
                return status, half, said
            if case == "changed":
                flipped = bytearray(data)
                flipped[len(data) // 2] ^= 0xFF
                return status, bytes(flipped), said
            if case == "hash":
                return (
                    status,
                    half,
                    said | {"ETag": f'"{"0" * 64}"', "Content-Length": str(len(half))},
                )
            if case == "chunked wrong":
                return (
                    status,
                    b"zz\r\n" + half,
                    {k: v for k, v in said.items() if k != "Content-Length"}
                    | {"Transfer-Encoding": "chunked"},
                )
            body = {
                "empty": b"",
                "another": b'{"a": 1}',
                "longer": data + b"more",
                "html": b"<html>",
            }[case]
            return status, body, said | {"Content-Length": str(len(body))}

        return self._attempt(f"body of {name}: {case}", "bad", place, tamper)

    def _redirects(self, rng: random.Random, place: Place) -> Attempt:
        what = rng.choice(["/api/", "/resolve/", SIDECAR])
        to = rng.choice(
            ["file:///etc/passwd", "http://127.0.0.1:9/x", "//127.0.0.1:9/x", "",
                "ftp://127.0.0.1/x", "http://",
             "x" * 3000, "/none", "http://[::1", "data:text/plain,x", f"{self._hub.url}/none",
             "around"]
        )  # fmt: skip

        def tamper(method: str, path: str, answer: Answer) -> Answer:
            if what not in path:
                return answer
            return (
                rng.choice([301, 302, 307, 308]),
                b"",
                {"Content-Length": "0", "Location": path if to == "around" else to},
            )

        return self._attempt(f"redirect of {what} to {to[:20]}", "bad", place, tamper)

    def _headers(self, rng: random.Random, place: Place) -> Attempt:
        """What a client builds paths from."""
        up = "../" * 5 + "outside/evil"  # from `blobs/` of the cache to the secret
        name, value = rng.choice(
            [("ETag", f'"{up}"'), ("ETag", f'"{place.outside / "evil"}"'), ("X-Repo-Commit", up),
             ("X-Repo-Commit", str(place.outside / "evil")), ("X-Linked-Etag", f'"{up}"'),
             ("X-Linked-Size", "x"), ("X-Linked-Size", "-1"), ("ETag", ""), ("X-Repo-Commit", ""),
             ("ETag", '"' + "x" * 3000 + '"'), ("Content-Encoding", "gzip"),
             ("Link", "<x>; rel=xet-auth")]
        )  # fmt: skip

        def tamper(method: str, path: str, answer: Answer) -> Answer:
            status, data, said = answer
            if "/resolve/" not in path:
                return answer
            said = {each: each_value for each, each_value in said.items() if each != name}
            return status, data, said | ({name: value} if value else {})

        elsewhere = "outside/evil" in value
        return self._attempt(f"header {name}", "bad" if elsewhere else "either", place, tamper)

    def _names(self, rng: random.Random, place: Place) -> Attempt:
        """Repositories by names that lead elsewhere."""
        from medusa_heads.hub.pull import pull

        name = rng.choice(
            ["../evil", "/etc/passwd", "a/b/c", "alice/..", "../..", "", ".", "alice/heads@",
                "alice/he\nads", "alice/\0",
             "alice/" + "x" * 300, "-a/b", "alice/heads..", "alice//heads", "alice\\heads",
             f"{words(rng, 1, 1)}", "\udcff/x"]
        )  # fmt: skip
        run = read_by(lambda: pull(name, place.out), [])
        return Attempt(f"name {name[:20]!r}", "bad", run, ("repository", "hub"))

    def __del__(self) -> None:
        self._hub.__exit__()
