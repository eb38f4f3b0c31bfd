"""With a certificate, the REST interface and its page are encrypted, and nothing else is."""

import ssl
from pathlib import Path

import httpx
import pytest

from testbed.fleets.controllers import running_controllers, until
from tests.fixtures.certificates import self_signed
from tests.fixtures.rest import bearer, rest_url


async def test_everything_goes_over_tls(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    files = {"tls_cert": str(certificate), "tls_key": str(key)}
    with running_controllers(tmp_path, 1, auth=files) as controllers:
        url = rest_url(controllers)
        assert url.startswith("https://")
        trust = ssl.create_default_context(cafile=str(certificate))
        async with httpx.AsyncClient(base_url=url, verify=trust, timeout=60) as client:

            async def leads() -> bool:
                return bool((await client.get("/api/v1/run")).json()["leader"] == "controller-0")

            await until(leads)
            page = await client.get("/")
            assert (
                page.status_code == 200 and "connect-src" in page.headers["content-security-policy"]
            )
            asked = {"request_id": "grow", "desired": {"rollout": 3}}
            done = await client.post("/api/v1/scale", json=asked, headers=bearer(controllers))
            assert "rollout=3" in done.json()["message"]
            (seen,) = (await client.get("/api/v1/run")).json()["controllers"]
            assert seen["rest"] == url
        # A stranger's certificate is not taken, and without TLS nothing is said.
        async with httpx.AsyncClient(timeout=60) as stranger:
            with pytest.raises(httpx.ConnectError):
                await stranger.get(f"{url}/healthz")
            with pytest.raises(httpx.HTTPError):
                await stranger.get(url.replace("https", "http") + "/healthz")
        log = controllers.log()
        assert "Traceback" not in log and bearer(controllers)["Authorization"].split()[1] not in log
