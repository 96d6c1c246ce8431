"""The part of the hub's HTTP API that pushing and pulling speaks, answered out of memory."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub.repository import LARGE, Repository, git_oid

if TYPE_CHECKING:
    from tests.hub.hub_server import LocalHub


@dataclass
class Refusal(Exception):
    """An answer other than 200."""

    status: int
    message: str
    code: str | None = None


class Handler(BaseHTTPRequestHandler):
    """Answers the requests to one hub."""

    hub: LocalHub
    protocol_version = "HTTP/1.1"
    wbufsize, disable_nagle_algorithm = -1, True  # a reply is one packet, which waits for no other

    def log_message(self, *_: object) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def _answer(self) -> None:
        split = urlsplit(self.path)
        path, query = split.path, parse_qs(split.query)
        body = self._read()
        try:
            assert not self.hub.closed
            self.hub.before(self.command, path)
            with self.hub.lock:
                self.hub.requests.append((self.command, path))
                self._user()
                for method, pattern, answer in _ROUTES:
                    found = re.fullmatch(pattern, path)
                    if found and self.command in method.split("|"):
                        names = {key: unquote(value) for key, value in found.groupdict().items()}
                        self._send(*answer(self, body, query, **names))
                        return
            raise Refusal(404, "Not found")
        except Refusal as refusal:
            headers = {"X-Error-Message": refusal.message}
            if refusal.code:
                headers["X-Error-Code"] = refusal.code
            self._send(refusal.status, {"error": refusal.message}, headers)
        except Exception:
            self.close_connection = True  # as where a cable is pulled

    do_GET = do_HEAD = do_POST = do_PUT = _answer

    def _read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _send(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    # Who asks, and what they may.

    def _user(self) -> str | None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in self.hub.users:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return self.hub.users.get(token)

    def _repository(self, repo: str, *, write: bool = False) -> Repository:
        found, owner = self.hub.repositories.get(repo), repo.split("/")[0]
        if found is None or (found.private and self._user() != owner):
            raise Refusal(404 if self._user() else 401, "Repository not found", "RepoNotFound")
        if write and self._user() != owner:
            raise Refusal(403, f"You don't have the rights to write to {repo}")
        return found

    def _commit_of(self, repo: str, revision: str) -> tuple[Repository, str]:
        found = self._repository(repo)
        sha = found.find(revision)
        if sha is None:
            raise Refusal(404, "Invalid rev id", "RevisionNotFound")
        return found, sha

    # The answers: status and content, perhaps headers.

    def create(self, body: bytes, _query: Any) -> tuple[int, Any]:
        asked = json.loads(body)
        user = self._user()
        owner = asked.get("organization") or user
        if user is None:
            raise Refusal(401, "Invalid username or password.")
        if owner != user:
            raise Refusal(403, f"You don't have the rights to create a model under {owner}")
        repo = f"{owner}/{asked['name']}"
        url = {"url": f"{self.hub.url}/{repo}"}
        if repo in self.hub.repositories:
            return 409, url | {"error": "You already created this model repo"}
        self.hub.repositories[repo] = made = Repository(asked.get("visibility") == "private")
        made.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        return 200, url

    def validate(self, body: bytes, _query: Any) -> tuple[int, Any]:
        text = json.loads(body)["content"]
        if not text.startswith("---\n"):
            return 200, {"errors": [], "warnings": [{"message": "empty metadata"}]}
        return 200, {"errors": [], "warnings": []}

    def info(self, _body: bytes, _query: Any, repo: str, revision: str = "main") -> tuple[int, Any]:
        found, sha = self._commit_of(repo, revision)
        siblings = [{"rfilename": name} for name in found.commits[sha]]
        return 200, {"id": repo, "sha": sha, "private": found.private, "siblings": siblings}

    def list_tree(self, _body: bytes, _query: Any, repo: str, revision: str) -> tuple[int, Any]:
        found, sha = self._commit_of(repo, revision)
        entries = []
        for name, data in found.commits[sha].items():
            entry = {"type": "file", "path": name, "size": len(data), "oid": git_oid(data)}
            if name.endswith(LARGE):
                oid = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"oid": oid, "size": len(data), "pointerSize": 130}
            entries.append(entry)
        return 200, entries

    def branch(self, body: bytes, _query: Any, repo: str, name: str) -> tuple[int, Any]:
        found = self._repository(repo, write=True)
        if name in found.refs:
            raise Refusal(409, "Reference already exists")
        begins = found.find(json.loads(body or b"{}").get("startingPoint", "main"))
        if begins is None:
            raise Refusal(404, "Invalid rev id", "RevisionNotFound")
        found.refs[name] = begins
        return 200, {}

    def preupload(self, body: bytes, query: Any, repo: str, revision: str) -> tuple[int, Any]:
        proposed = query.get("create_pr") == ["1"]
        found = self._repository(repo, write=not proposed)
        if found.find(revision) is None:
            raise Refusal(404, "Invalid rev id", "RevisionNotFound")
        tree, answers = found.tree(revision), []
        for file in json.loads(body)["files"]:
            name = file["path"]
            large = name.endswith(LARGE)
            answer = {"path": name, "uploadMode": "lfs" if large else "regular"}
            answer["shouldIgnore"] = False
            if name in tree:
                data = tree[name]
                answer["oid"] = hashlib.sha256(data).hexdigest() if large else git_oid(data)
            answers.append(answer)
        return 200, {"files": answers}

    def lfs_batch(self, body: bytes, _query: Any, repo: str) -> tuple[int, Any]:
        self._repository(repo)
        objects = []
        for asked in json.loads(body)["objects"]:
            answer: dict[str, Any] = dict(asked)
            if asked["oid"] not in self.hub.blobs:
                answer["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{asked['oid']}"}}
            objects.append(answer)
        return 200, {"transfer": "basic", "objects": objects}

    def lfs_put(self, body: bytes, _query: Any, oid: str) -> tuple[int, Any]:
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refusal(400, "The content is not what was announced")
        self.hub.blobs[oid] = body
        return 200, {}

    def commit(self, body: bytes, query: Any, repo: str, revision: str) -> tuple[int, Any]:
        proposed = query.get("create_pr") == ["1"]
        found = self._repository(repo, write=not proposed)
        if self._user() is None:
            raise Refusal(401, "Invalid username or password.")
        head, *operations = (json.loads(line) for line in body.splitlines())
        if found.refs.get(revision) != head["value"].get("parentCommit", found.refs.get(revision)):
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        tree = dict(found.tree(revision))
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                tree[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                tree[value["path"]] = self.hub.blobs[value["oid"]]
            elif operation["key"] == "deletedFile":
                del tree[value["path"]]
        number = 1 + sum(name.startswith("refs/pr/") for name in found.refs)
        ref = f"refs/pr/{number}" if proposed else revision
        sha = found.commit(ref, tree, head["value"]["summary"])
        answer = {"commitUrl": f"{self.hub.url}/{repo}/commit/{sha}", "commitOid": sha}
        answer["pullRequestUrl"] = f"{self.hub.url}/{repo}/discussions/{number}"
        return 200, answer

    def resolve(
        self, _body: bytes, _query: Any, repo: str, revision: str, name: str
    ) -> tuple[int, Any, dict[str, str]]:
        found, sha = self._commit_of(repo, revision)
        data = found.commits[sha].get(name)
        if data is None:
            raise Refusal(404, "Entry not found", "EntryNotFound")
        etag = hashlib.sha256(data).hexdigest() if name.endswith(LARGE) else git_oid(data)
        return 200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": sha}


_REPO = r"(?P<repo>[^/]+/[^/]+)"
_REVISION = r"(?P<revision>[^/]+)"
_ROUTES: list[tuple[str, str, Callable[..., Any]]] = [
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate),
    ("GET", f"/api/models/{_REPO}", Handler.info),
    ("GET", f"/api/models/{_REPO}/revision/{_REVISION}", Handler.info),
    ("GET", f"/api/models/{_REPO}/tree/{_REVISION}", Handler.list_tree),
    ("POST", f"/api/models/{_REPO}/branch/(?P<name>[^/]+)", Handler.branch),
    ("POST", f"/api/models/{_REPO}/preupload/{_REVISION}", Handler.preupload),
    ("POST", f"/api/models/{_REPO}/commit/{_REVISION}", Handler.commit),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", Handler.lfs_batch),
    ("PUT", "/lfs/(?P<oid>[0-9a-f]+)", Handler.lfs_put),
    ("GET|HEAD", f"/{_REPO}/resolve/{_REVISION}/(?P<name>.+)", Handler.resolve),
]
