"""S3 as a process of its own on its host: `python -m tests.cluster.storage <host> <port>` until it is killed."""

from __future__ import annotations

import logging
import sys
import threading

from tests.s3_server import S3Server, connect

BUCKET = "cluster"
PORT = 9000


def main(arguments: list[str]) -> None:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else a line for each request
    server = S3Server(host=arguments[0], port=int(arguments[1]))
    connection = connect(server)
    connection.call("create_bucket", Bucket=BUCKET)
    connection.close()
    print(server.url, flush=True)  # noqa: T201
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
