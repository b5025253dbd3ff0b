"""Unfinished multipart uploads of an S3 bucket: list them, abort them.

A process that dies in an upload leaves parts behind that no listing of objects shows and that cost space for ever.
obstore aborts its own uploads but cannot name those of a dead process, so these two requests are signed and sent
here (AWS Signature Version 4, the standard library alone).
"""

import hashlib
import hmac
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree

_TIMEOUT_S = 30.0
_EMPTY = hashlib.sha256(b"").hexdigest()


class Multiparts:
    """config: as obstore gives it: bucket, endpoint, region, keys; what it lacks comes from the environment.

    Every method raises OSError, with the server's answer in its text, when a request fails.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._id, self._secret, self._token = _keys(config)
        self._region = str(
            config.get("region") or _variable("AWS_REGION", "AWS_DEFAULT_REGION") or "us-east-1"
        )
        endpoint = (
            config.get("aws_endpoint_url_s3")
            or config.get("endpoint")
            or _variable("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
            or f"https://s3.{self._region}.amazonaws.com"
        )
        self._endpoint = str(endpoint).rstrip("/")
        hosted = str(config.get("virtual_hosted_style_request", "")).lower() == "true"
        self._root = "" if hosted else f"/{config['bucket']}"

    @staticmethod
    def possible(config: Mapping[str, Any]) -> bool:
        """Keys are known, and not only to obstore (it also takes them from the machine's role)."""
        return all(_keys(config)[:2])

    def unfinished(self, prefix: str) -> list[tuple[str, str]]:
        """(key, upload id) of every unfinished upload below a prefix."""
        found: list[tuple[str, str]] = []
        marker = {"key-marker": "", "upload-id-marker": ""}
        while True:
            query = {"uploads": "", "prefix": prefix} | {k: v for k, v in marker.items() if v}
            page = _parsed(self._send("GET", "", query))
            for upload in page.iter("Upload"):
                found.append((upload.findtext("Key", ""), upload.findtext("UploadId", "")))
            if page.findtext("IsTruncated", "false").strip() != "true":
                return [(key, upload) for key, upload in found if key.startswith(prefix)]
            marker["key-marker"] = page.findtext("NextKeyMarker", "")
            marker["upload-id-marker"] = page.findtext("NextUploadIdMarker", "")

    def abort(self, key: str, upload: str) -> None:
        """An upload that is gone already is no error."""
        self._send("DELETE", f"/{key}", {"uploadId": upload}, gone=True)

    def _send(self, method: str, path: str, query: Mapping[str, str], *, gone: bool = False) -> bytes:
        target = urlsplit(self._endpoint)
        path = quote(f"{target.path}{self._root}{path}" or "/", safe="/-_.~")
        text = "&".join(f"{quote(k, safe='-_.~')}={quote(v, safe='-_.~')}" for k, v in sorted(query.items()))
        headers = self._signed(method, target.netloc, path, text)
        request = urllib.request.Request(
            f"{target.scheme}://{target.netloc}{path}?{text}", method=method, headers=headers
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                return answer.read()
        except urllib.error.HTTPError as fault:
            if gone and fault.code == 404:
                return b""
            said = fault.read(2000).decode(errors="replace")
            raise OSError(f"{method} {path}?{text}: status code: {fault.code} {said}") from fault

    def _signed(self, method: str, host: str, path: str, query: str) -> dict[str, str]:
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        headers = {"host": host, "x-amz-content-sha256": _EMPTY, "x-amz-date": now}
        if self._token:
            headers["x-amz-security-token"] = self._token
        names = ";".join(sorted(headers))
        lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        canonical = f"{method}\n{path}\n{query}\n{lines}\n{names}\n{_EMPTY}"
        scope = f"{now[:8]}/{self._region}/s3/aws4_request"
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        key = f"AWS4{self._secret}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.new(
            key, f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{digest}".encode(), "sha256"
        ).hexdigest()
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={self._id}/{scope}, SignedHeaders={names}, Signature={signature}"
        )
        return headers


def _keys(config: Mapping[str, Any]) -> tuple[str, str, str]:
    """Access key, secret, session token."""
    if config.get("access_key_id"):
        return tuple(
            str(config.get(name) or "") for name in ("access_key_id", "secret_access_key", "session_token")
        )  # type: ignore[return-value]
    return (
        _variable("AWS_ACCESS_KEY_ID"),
        _variable("AWS_SECRET_ACCESS_KEY"),
        _variable("AWS_SESSION_TOKEN", "AWS_TOKEN"),
    )


def _variable(*names: str) -> str:
    return next((value for name in names if (value := os.environ.get(name))), "")


def _parsed(raw: bytes) -> ElementTree.Element:
    """The tree without namespaces, which differ between servers."""
    try:
        root = ElementTree.fromstring(raw)
    except ElementTree.ParseError as fault:
        raise OSError(f"the list of unfinished uploads is no XML: {raw[:200]!r}") from fault
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root
