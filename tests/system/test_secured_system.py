"""The README's section "Secure", run as it stands by real processes: certificates, tokens, mTLS inside, TLS outside."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from processes import free_port
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common
from synthetic_oracle import continue_greedily

from blockplane.client.client import Client
from blockplane.protos.access import Access
from blockplane.protos.channel import PEER_OPTIONS
from blockplane.protos.errors import AuthenticationError, PermissionDeniedError, UnavailableError
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1.engine_pb2_grpc import EngineStub

README = (Path(__file__).parents[2] / "README.md").read_text()
SECTION = README.partition("\n## Secure\n")[2].partition("\n## ")[0]
MAKE, RUN = re.findall(r"^```\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)[:2]
PROMPT = list(range(50))
NUM_TOKENS = 40

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Secured:
    """The processes of the section, in a folder with its certificates."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address, self.engine_address = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self._environ = os.environ | {
            "BLOCKPLANE_ADDRESS": self.address,
            "BLOCKPLANE_ENGINE_ADDRESS": self.engine_address,
            "BLOCKPLANE_MODEL": "synthetic",
            "OMP_NUM_THREADS": "1",
        }
        self._bash(MAKE).check_returncode()
        self.serving, self.generate = re.fullmatch(r"(.*&\n)(blockplane generate .*\n)", RUN, re.DOTALL).groups()  # type: ignore[union-attr]

    def _script(self, commands: str) -> list[str]:
        return ["bash", "-ec", f'blockplane() {{ {sys.executable} -m blockplane.client "$@"; }}\n{commands}']

    def _bash(self, commands: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._script(commands), cwd=self.folder, env=self._environ, capture_output=True, text=True, timeout=120
        )

    def serve(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._script(self.serving + "wait"), cwd=self.folder, env=self._environ, start_new_session=True
        )

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """A client's command behind what is exported before."""
        return self._bash(self.serving.partition("\n")[0] + "\n" + command)

    def access(self, token: str = "", certificate: str = "") -> Access:
        folder = self.folder / "certificates"
        own = (f"{folder}/{certificate}.pem", f"{folder}/{certificate}.key") if certificate else ("", "")
        return Access(f"{folder}/ca.pem", *own, token=f"{folder}/{token}.token" if token else "")


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    system = Secured(tmp_path_factory.mktemp("secured"))
    processes = system.serve()
    try:
        with Client(system.address, access=system.access()) as client:
            client.wait_until_serving(timeout=120)
        yield system
    finally:
        os.killpg(processes.pid, signal.SIGKILL)
        processes.wait()


def test_a_worker_and_a_frontend_attach_by_their_certificates_and_a_client_is_served_by_its_token(
    secured: Secured,
) -> None:
    ran = secured.run(secured.generate)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()
    with Client(secured.address, access=secured.access("alice")) as client:
        deltas = client.generate(PROMPT, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    assert token_ids == continue_greedily(PROMPT, NUM_TOKENS, ignore_eos=True)


def test_without_its_token_or_its_trust_a_client_is_told_so_in_a_sentence(secured: Secured) -> None:
    with (
        pytest.raises(AuthenticationError, match="asks for a token"),
        Client(secured.address, access=secured.access()) as client,
    ):
        client.model_info()
    with pytest.raises(UnavailableError, match="no server answers"), Client(secured.address) as client:
        client.model_info()
    ran = secured.run('blockplane generate "The sea was"')
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("blockplane generate: this server asks for a token;")


def test_who_has_no_certificate_gets_no_word_with_the_engine(secured: Secured) -> None:
    question = pb.GetStatisticsRequest()
    with secured.access(certificate="worker").channel(secured.engine_address, PEER_OPTIONS) as channel:
        assert EngineStub(channel).GetStatistics(question).num_groups == 1
        for name in ("", "blockplane.v1.Engine"):
            answer = HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    for access in (secured.access(), secured.access("root"), Access()):
        with access.channel(secured.engine_address, PEER_OPTIONS) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                EngineStub(channel).GetStatistics(question, timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_request_is_its_tokens_and_another_token_cannot_abort_it(secured: Secured) -> None:
    with (
        Client(secured.address, access=secured.access("alice")) as alice,
        Client(secured.address, "alice", secured.access("root")) as root,
    ):
        deltas = alice.generate(PROMPT, max_tokens=400, temperature=0, ignore_eos=True, request_id="hers")
        next(deltas)
        root.abort(["hers"])
        assert sum(len(delta.token_ids) for delta in deltas) > 300


def test_what_is_not_for_clients_is_denied_them(secured: Secured) -> None:
    alice, root = secured.access("alice"), secured.access("root")
    with root.channel(secured.address, PEER_OPTIONS) as channel:
        flush = vllm_engine_pb2_grpc.VllmEngineStub(channel).FlushCache
        assert flush(common.FlushCacheRequest(), metadata=root.metadata(secured.address)).success
        with pytest.raises(grpc.RpcError) as caught:
            flush(common.FlushCacheRequest(), metadata=alice.metadata(secured.address))
    assert caught.value.code() is PermissionDeniedError.status
