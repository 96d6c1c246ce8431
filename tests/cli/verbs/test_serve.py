"""`medusa-heads serve`: what it refuses, and that it serves until it is told to end."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from medusa_heads.cli.main import main
from tests.conftest import Refused


def serve(checkpoint: Path, *flags: str) -> list[str]:
    folders = [str(checkpoint / "heads"), "--target", str(checkpoint / "target")]
    return ["serve", *folders, "--tree", "chain", *flags]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--max_rows", "0"], "max_rows must be at least 1, got 0"),
        (["--queue", "0"], "queue must be at least 1, got 0"),
        (["--cache_gb", "0"], "cache_gb must be above 0"),
        (["--cache_gb", "nan"], "cache_gb must be above 0"),
        (["--cache_gb", "inf"], "cache_gb must be above 0"),
        (["--kept_gb", "-1"], "kept_gb must be at least 0"),
        (["--kept_gb", "nan"], "kept_gb must be at least 0"),
        (["--api_key_variable", "NO_SUCH_KEY"], "NO_SUCH_KEY holds no API key"),
        (["--port", "-1"], "port must be at least 0"),
        (["--port", "70000"], "nobody can listen"),
        (["--allowed_origins", "https://page.example/"], "without a path or a slash at its end"),
        (["--host", "256.0.0.1", "--port", "0"], "nobody can listen"),
    ],
    ids=str,
)
def test_what_is_refused(
    checkpoint: Path, flags: list[str], sentence: str, refused: Refused
) -> None:
    assert sentence in refused(main, serve(checkpoint, *flags))


@pytest.mark.slow
def test_a_process_serves_until_it_is_told_to_end(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "medusa_heads.cli.main", "serve", str(checkpoint / "heads")]
    command += ["--target", str(checkpoint / "target"), "--tree", "chain", "--port", "0"]
    command += ["--api_key_variable", "KEY", "--model_name", "tiny"]
    environment = {**os.environ, "KEY": "s3cret\r"}  # of a file with Windows' ends
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        said = ""
        while (found := re.search(r"Listening at http://(\S+)/v1", said)) is None:
            line = process.stderr.readline()
            assert line, said
            said += line
        connection = http.client.HTTPConnection(found[1], timeout=60)
        headers = {"Authorization": "Bearer s3cret"}
        body = json.dumps({"model": "tiny", "prompt": "abc", "max_tokens": 5})
        connection.request("POST", "/v1/completions", body, headers)
        response = connection.getresponse()
        assert response.status == 200 and json.loads(response.read())["usage"]["total_tokens"] == 8
        connection.close()
        process.send_signal(signal.SIGTERM)
        said += process.stderr.read()
    assert process.returncode == 143 and "ended by SIGTERM" in said and "s3cret" not in said
