"""How to reach one API server and who we are there: what remains of a kubeconfig once it was read.

Only contents, never paths or programs: whoever holds an `Access` can't be made to open or run anything by it.
"""

from __future__ import annotations

import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Access:
    """`ca`, `certificate` and `key` are PEM texts; without `ca` the system's authorities are trusted."""

    server: str  # https://host[:port][/prefix]
    ca: str | None = None
    token: str | None = field(default=None, repr=False)
    certificate: str | None = None
    key: str | None = field(default=None, repr=False)
    tls_server_name: str | None = None

    def same_server(self, other: Access) -> bool:
        """Whether both lead to the same API server, whoever we are there."""
        mine = (self.server, self.ca, self.tls_server_name)
        return mine == (other.server, other.ca, other.tls_server_name)

    def ssl_context(self) -> ssl.SSLContext:
        """TLS that verifies the server. Raises ssl.SSLError where the certificates or the key don't fit."""
        context = ssl.create_default_context(cadata=self.ca)
        if self.certificate and self.key:
            # OpenSSL's Python side takes a client key from a file only; the folder is ours alone and gone at once.
            with tempfile.TemporaryDirectory(prefix="crosscloud-") as folder:
                path = Path(folder, "client.pem")
                path.touch(mode=0o600)
                path.write_text(f"{self.certificate}\n{self.key}\n")
                context.load_cert_chain(path)
        return context
