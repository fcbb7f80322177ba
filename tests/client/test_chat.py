"""`blockplane chat`: messages to prompts by templates, lines to answers, and how each of them may end."""

import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import grpc
import pytest
from fake_inference import WAIT_SECONDS, FakeServer

from blockplane.client import cli
from blockplane.client.chat_template import ChatTemplate, Message
from blockplane.protos.errors import ModelError
from blockplane.v1 import inference_pb2 as pb

COMMAND = [sys.executable, "-m", "blockplane.client", "chat"]

TURNS = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('Unknown role: ' + message['role']) }}
    {%- endif %}
<|{{ message.role }}|>{{ message.content | trim }}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}
<|assistant|>
{%- endif -%}
"""


def said(*pairs: str) -> Sequence[Message]:
    return [{"role": role, "content": content} for role, content in zip(pairs[::2], pairs[1::2], strict=True)]


def test_a_template_makes_a_prompt_that_ends_where_the_answer_begins():
    template = ChatTemplate(TURNS, bos_token="<s>")
    assert template.render(said("system", "Be brief.", "user", " hi ")) == (
        "<s><|system|>Be brief.<|end|><|user|>hi<|end|><|assistant|>"
    )


def test_a_model_without_a_bos_token_has_none_in_its_prompts():
    assert ChatTemplate(TURNS).render(said("user", "hi")).startswith("<|user|>")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("a{% generation %}{{ messages[0].content }}{% endgeneration %}b", "ahib"),
        ("{% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
        ("{{ eos_token }}{{ unknown }}", "</s>"),
        ("{{ strftime_now('%Y') }}", str(datetime.now().year)),
    ],
)
def test_templates_have_what_hugging_face_gives_them(source: str, text: str):
    assert ChatTemplate(source, eos_token="</s>").render(said("user", "hi")) == text


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (TURNS, "Unknown role: tool"),
        ("{{ messages[0].content + 1 }}", "does not take this chat"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "does not take this chat"),
        ("{% for x in range(10 ** 9) %}{% endfor %}", "range"),
    ],
)
def test_a_template_that_refuses_or_reaches_too_far_is_one_sentence(source: str, sentence: str):
    with pytest.raises(ModelError, match=sentence):
        ChatTemplate(source).render(said("tool", "hi"))


def test_what_is_no_template_is_said_at_once():
    with pytest.raises(ModelError, match="cannot be read"):
        ChatTemplate("{% if %}")


@pytest.fixture
def chat_server(fake_server: FakeServer) -> FakeServer:
    """A server that answers `One.`, then `Two.`."""
    fake = fake_server.inference
    fake.model.chat_template, fake.model.bos_token = TURNS, "<s>"
    usage = pb.Usage(num_prompt_tokens=9, num_cached_tokens=4, num_output_tokens=2)
    fake.parts = [
        ((pb.GenerateResponse(text=text[:2]), pb.GenerateResponse(text=text[2:], finish_reason=1, usage=usage)), None)
        for text in ("One.", "Two.")
    ]
    return fake_server


def chat(server: FakeServer, stdin: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "--address", server.address, *flags],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )


def test_each_line_is_answered_and_the_next_prompt_has_all_turns_before_it(chat_server: FakeServer):
    ran = chat(
        chat_server, "hi\n\nmore\n", "--system", "Be brief.", "--temperature", "0", "--max-tokens", "9", "--usage"
    )
    told = "(9 prompt tokens, 4 of them cached; 2 output tokens)\n"
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "One.\nTwo.\n", 2 * told)
    first, second = chat_server.inference.requests
    assert first.text == "<s><|system|>Be brief.<|end|><|user|>hi<|end|><|assistant|>"
    assert second.text == first.text + "One.<|end|><|user|>more<|end|><|assistant|>"
    assert first.sampling_params == pb.SamplingParams(temperature=0, max_tokens=9)


def test_the_server_is_told_that_the_prompt_spells_its_own_bos_token(chat_server: FakeServer):
    chat(chat_server, "hi\n")
    (request,) = chat_server.inference.requests
    assert request.HasField("add_special_tokens")
    assert not request.add_special_tokens


def test_a_template_may_come_from_a_file(chat_server: FakeServer, tmp_path: Path):
    path = tmp_path / "chat.jinja"
    path.write_text("Q: {{ messages[-1].content }}\nA:", encoding="utf-8")
    assert chat(chat_server, "hi", "--template", str(path)).returncode == 0
    assert chat_server.inference.requests[0].text == "Q: hi\nA:"


def test_a_model_without_a_template_says_what_to_do(fake_server: FakeServer, capsys):
    assert cli.main(["chat", "--address", fake_server.address]) == 1
    assert "fake has no chat template" in (error := capsys.readouterr().err)
    assert "--template FILE" in error
    assert not fake_server.inference.requests


def test_a_template_file_that_is_not_there_is_one_sentence(fake_server: FakeServer, capsys):
    assert cli.main(["chat", "--address", fake_server.address, "--template", "/nowhere"]) == 1
    assert capsys.readouterr().err.startswith("blockplane chat: --template names /nowhere, which cannot be read")


def test_a_failure_ends_a_chat_that_nobody_sits_at(chat_server: FakeServer):
    chat_server.inference.parts = [((), (grpc.StatusCode.RESOURCE_EXHAUSTED, "it is full; retry."))]
    ran = chat(chat_server, "hi\nmore\n")
    assert (ran.returncode, ran.stderr) == (1, "blockplane chat: it is full; retry.\n")
    assert len(chat_server.inference.requests) == 1


class Terminal:
    """A chat on a terminal of its own."""

    def __init__(self, server: FakeServer) -> None:
        self._end, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, "--address", server.address],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(theirs)
        self._shown = ""

    def wait_for(self, text: str) -> None:
        """Read on until `text` is shown."""
        while text not in self._shown:
            self._shown += os.read(self._end, 4096).decode()
        self._shown = self._shown.partition(text)[2]

    def interrupt_until(self, text: str) -> None:
        """Press Ctrl-C until `text` is shown; readline loses one between its prompt and its wait for a key."""
        while text not in self._shown:
            self.process.send_signal(signal.SIGINT)
            select.select([self._end], [], [], 1.0)
            while select.select([self._end], [], [], 0.1)[0]:
                self._shown += os.read(self._end, 4096).decode()
        self._shown = self._shown.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._end)


@pytest.fixture
def terminal(chat_server: FakeServer):
    terminal = Terminal(chat_server)
    yield terminal
    terminal.close()


def test_ctrl_c_stops_the_answer_and_not_the_chat(chat_server: FakeServer, terminal: Terminal):
    fake = chat_server.inference
    fake.endless, fake.parts = True, []
    terminal.wait_for("> ")
    terminal.type("hi\n")
    terminal.wait_for("xxx")
    terminal.process.send_signal(signal.SIGINT)
    assert fake.cancelled.wait(WAIT_SECONDS)
    fake.endless, fake.responses = False, (pb.GenerateResponse(text="Yes."),)
    terminal.wait_for("> ")
    terminal.interrupt_until("> ")
    terminal.type("still there?\n")
    terminal.wait_for("Yes.")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(WAIT_SECONDS) == 0
    assert "<|assistant|>xx" in fake.requests[1].text, "what had come is part of the chat"


def test_a_failure_is_told_and_the_chat_goes_on_without_it(chat_server: FakeServer, terminal: Terminal):
    fake = chat_server.inference
    fake.parts.insert(0, ((), (grpc.StatusCode.RESOURCE_EXHAUSTED, "it is full; retry.")))
    terminal.wait_for("> ")
    terminal.type("hi\n")
    terminal.wait_for("it is full; retry.")
    terminal.wait_for("> ")
    terminal.type("again\n")
    terminal.wait_for("One.")
    assert fake.requests[1].text == "<s><|user|>again<|end|><|assistant|>"
