"""Object stores here, each in a process of its own: moto for `s3://`, gcp-storage-emulator for `gs://`.

The one of Google's store takes the condition of a put and forgets it, as some stores do that look like it.
As `gs` it is taught to keep it, as the real one does; as `gs-unconditional` it is left as it is. Both are
taught to say of what generation an object is that is read, by which TensorStore writes over it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
BUCKET = "bucket"
PACKAGES = {
    "s3": ("moto", "flask", "flask_cors", "s3fs"),
    "gs": ("gcp_storage_emulator", "gcsfs"),
    "gs-unconditional": ("gcp_storage_emulator", "gcsfs"),
}


def missing(name: str) -> str:
    """The packages of an emulator that are not installed; none is imported: gcsfs reads the environment."""
    return ", ".join(x for x in PACKAGES[name] if importlib.util.find_spec(x) is None)


def environment(name: str, port: int, folder: Path) -> dict[str, str]:
    """What makes clients use an emulator.

    Arguments:
      folder: for files that AWS's clients look for.
    """
    at = f"http://127.0.0.1:{port}"
    if name != "s3":
        # gcsfs asks by gRPC what kind of bucket it is, which no emulator knows.
        gcs = {"STORAGE_EMULATOR_HOST": at, "TENSORSTORE_GCS_HTTP_URL": at, "NO_GCE_CHECK": "true"}
        return {**gcs, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    file = folder / "aws"
    file.write_text("[default]\naws_access_key_id = id\naws_secret_access_key = key\nregion = us-east-1\n")
    files = dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), str(file))
    keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}
    return {**files, **keys, "AWS_ENDPOINT_URL": at, "AWS_EC2_METADATA_DISABLED": "true"}


@contextlib.contextmanager
def running(name: str, folder: Path) -> Iterator[dict[str, str]]:
    """An emulator with one empty bucket; the environment for its clients."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.runtime.checkpoint.emulators", name]
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (folder / f"{name}.log").read_text()[-2000:]
        yield environment(name, int(line), folder)
    finally:
        process.kill()
        process.communicate()


def s3() -> int:
    """Starts moto; its port."""
    server = importlib.import_module("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    backends = importlib.import_module("moto.s3.models").s3_backends
    backends["123456789012"]["aws"].create_bucket(BUCKET, "us-east-1")
    return int(server.get_host_and_port()[1])


def gs(keeps_conditions: bool) -> int:
    """Starts the emulator of Google's store; its port."""
    objects = importlib.import_module("gcp_storage_emulator.handlers.objects")
    if keeps_conditions:
        objects.insert = conditional(objects.insert)
    objects.download = with_generation(objects.download)
    make = importlib.import_module("gcp_storage_emulator.server").create_server
    server = make("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
    server.start()
    return int(server._api._httpd.server_address[1])


def conditional(insert: Any) -> Any:
    """An upload that is refused where its condition does not hold."""

    def checked(request: Any, response: Any, storage: Any, *args: Any, **kwargs: Any) -> None:
        wanted = request.query.get("ifGenerationMatch", [None])[0]
        name = request.query["name"][0] if "name" in request.query else request.data["meta"]["name"]
        there = storage.objects.get(request.params["bucket_name"], {}).get(name)
        if wanted is not None and wanted != (there or {"generation": "0"})["generation"]:
            response.status = HTTPStatus.PRECONDITION_FAILED
            return
        insert(request, response, storage, *args, **kwargs)

    return checked


def with_generation(download: Any) -> Any:
    """A download that says of which generation it is."""

    def said(request: Any, response: Any, storage: Any, *args: Any, **kwargs: Any) -> None:
        found = storage.objects.get(request.params["bucket_name"], {}).get(request.params["object_id"])
        if found is not None:
            response["x-goog-generation"] = found["generation"]
        download(request, response, storage, *args, **kwargs)

    return said


if __name__ == "__main__":
    print(s3() if sys.argv[1] == "s3" else gs(sys.argv[1] == "gs"), flush=True)
    while os.getppid() != 1:  # who has started it is gone
        time.sleep(1)
