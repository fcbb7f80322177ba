"""Certificate authorities of the tests' own, by the `openssl` program; knows no server."""

import subprocess
from pathlib import Path

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Authority:
    """A certificate authority: `ca` is its certificate's file, and whoever it signs for gets NAME.pem and NAME.key."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.ca, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        # What a certificate's issuer is found by is its name, so that two authorities must not share one.
        self._openssl("req", "-x509", *_NEW_KEY, "-subj", f"/CN={name}", "-keyout", self._key, "-out", self.ca)

    def issue(self, name: str, *, expired: bool = False) -> tuple[str, str]:
        """A certificate for this machine, and its key."""
        request, certificate, key = (self.folder / f"{name}.{ending}" for ending in ("csr", "pem", "key"))
        names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
        self._openssl(
            "req", "-new", *_NEW_KEY, "-subj", f"/CN={name}", "-addext", names, "-keyout", key, "-out", request
        )
        signer = ("-CA", self.ca, "-CAkey", self._key, "-copy_extensions", "copy")
        days = ("-days", "-1" if expired else "1")
        self._openssl("x509", "-req", "-in", request, *signer, *days, "-out", certificate)
        return str(certificate), str(key)

    def _openssl(self, *arguments: str | Path) -> None:
        done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
