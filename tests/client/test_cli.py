"""The `blockplane` command: flags to requests, deltas to the terminal, failures to one sentence and a status."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from fake_inference import WAIT_SECONDS, FakeServer

from blockplane import __version__
from blockplane.client import cli
from blockplane.client.processes import MODULES
from blockplane.v1 import inference_pb2 as pb

COMMAND = [sys.executable, "-m", "blockplane.client"]


@pytest.fixture
def story_server(fake_server: FakeServer) -> FakeServer:
    fake_server.inference.responses = (
        pb.GenerateResponse(token_ids=[5, 6], text="Once"),
        pb.GenerateResponse(
            token_ids=[7],
            text=" möre",
            finish_reason=pb.FINISH_REASON_STOP,
            usage=pb.Usage(num_prompt_tokens=2, num_output_tokens=3, num_cached_tokens=1),
        ),
    )
    return fake_server


def generate(server: FakeServer, *arguments: str) -> int:
    return cli.main(["generate", "--address", server.address, *arguments])


def test_generate_prints_the_text_and_one_line_end(story_server: FakeServer, capsys):
    assert generate(story_server, "hi") == 0
    assert capsys.readouterr() == ("Once möre\n", "")


def test_json_lines_hold_the_deltas_and_only_the_last_its_end(story_server: FakeServer, capsys):
    assert generate(story_server, "hi", "--json") == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"sample_index": 0, "token_ids": [5, 6], "text": "Once"},
        {
            "sample_index": 0,
            "token_ids": [7],
            "text": " möre",
            "finish_reason": "stop",
            "usage": {"num_prompt_tokens": 2, "num_output_tokens": 3, "num_cached_tokens": 1},
        },
    ]


def test_flags_become_sampling_parameters(story_server: FakeServer):
    flags = "--max-tokens 4 --min-tokens 2 --temperature 0 --top-k 7 --top-p 0.95 --min-p 0.1 --seed 9 --ignore-eos"
    penalties = "--presence-penalty -0.5 --frequency-penalty 0.5 --repetition-penalty 1.2"
    lists = "--stop-token-ids 5 --logit-bias 7=-1.5 --logit-bias 8=2 --allowed-token-ids 7,8,9"
    told = "--logprobs 3 --prompt-logprobs 0"
    generate(story_server, "hi", *f"{flags} {penalties} {lists} {told}".split(), "--bad-word", "a b", "--bad-word=c")
    params = pb.SamplingParams(
        max_tokens=4,
        min_tokens=2,
        temperature=0.0,
        top_k=7,
        top_p=0.95,
        min_p=0.1,
        seed=9,
        ignore_eos=True,
        presence_penalty=-0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        stop_token_ids=[5],
        logit_bias={7: -1.5, 8: 2},
        allowed_token_ids=pb.TokenIds(ids=[7, 8, 9]),
        bad_words=["a b", "c"],
        logprobs=3,
        prompt_logprobs=0,
    )
    assert story_server.inference.requests == [pb.GenerateRequest(text="hi", sampling_params=params, num_samples=1)]


@pytest.mark.parametrize(
    "slip", [("--logit-bias", "5"), ("--logit-bias", "x=1"), ("--allowed-token-ids", "5,"), ("--stop-token-ids", "a")]
)
def test_a_slip_in_a_flag_is_told_as_what_it_should_be(story_server: FakeServer, slip: tuple[str, str], capsys):
    with pytest.raises(SystemExit) as exited:
        generate(story_server, "hi", *slip)
    assert exited.value.code == 2
    assert f"argument {slip[0]}: '{slip[1]}' is no " in capsys.readouterr().err


@pytest.fixture
def samples_server(fake_server: FakeServer) -> FakeServer:
    usage = pb.Usage(num_prompt_tokens=2, num_output_tokens=3)
    fake_server.inference.responses = (
        pb.GenerateResponse(token_ids=[5], text="On", sample_index=1),
        pb.GenerateResponse(token_ids=[6], text="Then", sample_index=0),
        pb.GenerateResponse(text="ce", sample_index=1, finish_reason=pb.FINISH_REASON_STOP, usage=usage),
        pb.GenerateResponse(text=" it.", sample_index=0, finish_reason=pb.FINISH_REASON_LENGTH, usage=usage),
    )
    return fake_server


def test_several_samples_are_printed_whole_as_they_end(samples_server: FakeServer, capsys):
    assert generate(samples_server, "hi", "--num-samples", "2") == 0
    assert capsys.readouterr().out == "--- sample 1, stop\nOnce\n--- sample 0, length\nThen it.\n"
    assert samples_server.inference.requests[0].num_samples == 2


def test_samples_that_have_ended_are_printed_before_a_failure_is(samples_server: FakeServer, capsys):
    samples_server.inference.failure = (grpc.StatusCode.INTERNAL, "it was not finite; look.")
    samples_server.inference.responses = samples_server.inference.responses[:3]
    assert generate(samples_server, "hi", "--num-samples", "2") == 1
    assert capsys.readouterr() == ("--- sample 1, stop\nOnce\n", "blockplane generate: it was not finite; look.\n")


def test_json_lines_of_several_samples_come_as_they_do(samples_server: FakeServer, capsys):
    assert generate(samples_server, "hi", "--num-samples", "2", "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["sample_index"], line["text"]) for line in lines] == [(1, "On"), (0, "Then"), (1, "ce"), (0, " it.")]


def test_json_tells_logprobs(fake_server: FakeServer, capsys):
    told = pb.TokenLogprobs(token_id=5, logprob=-1.5, top_token_ids=[7], top_logprobs=[-0.5])
    fake_server.inference.responses = (pb.GenerateResponse(token_ids=[5], logprobs=[told]),)
    assert generate(fake_server, "hi", "--logprobs", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["logprobs"] == [
        {"token_id": 5, "logprob": -1.5, "top_token_ids": [7], "top_logprobs": [-0.5]}
    ]


def test_flags_become_what_is_asked_of_the_scheduler(story_server: FakeServer):
    generate(story_server, "hi", "--stop", "END", "--stop=\n", "--priority", "-5", "--skip-prefix-cache")
    params = pb.SamplingParams(stop=["END", "\n"])
    assert story_server.inference.requests == [
        pb.GenerateRequest(text="hi", sampling_params=params, num_samples=1, priority=-5, skip_prefix_cache=True)
    ]


def test_flags_say_how_prompt_and_output_are_told(story_server: FakeServer):
    flags = ("--include-stop", "--special-tokens", "--no-spaces-between-special-tokens", "--truncate-prompt-tokens=7")
    generate(story_server, "hi", *flags, "--whole-output")
    params = pb.SamplingParams(
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        truncate_prompt_tokens=7,
    )
    assert story_server.inference.requests == [
        pb.GenerateRequest(text="hi", sampling_params=params, num_samples=1, whole_output=True)
    ]


def test_flags_say_what_the_output_must_be(story_server: FakeServer, tmp_path: Path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"const": "é"}', encoding="utf-8")
    cases: dict[tuple[str, ...], pb.SamplingParams] = {
        ("--json-schema", f"@{schema}"): pb.SamplingParams(json_schema='{"const": "é"}'),
        ("--json-schema", '{"type": "null"}'): pb.SamplingParams(json_schema='{"type": "null"}'),
        ("--json-object",): pb.SamplingParams(json_object=True),
        ("--regex", "@a+"): pb.SamplingParams(regex="@a+"),
        ("--grammar", 'start: "a"'): pb.SamplingParams(grammar='start: "a"'),
        ("--choice", "a b", "--choice=c"): pb.SamplingParams(choice=pb.Choice(texts=["a b", "c"])),
    }
    for flags, params in cases.items():
        assert generate(story_server, "hi", *flags) == 0
        assert story_server.inference.requests.pop().sampling_params == params


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--regex", "a", "--json-object"), "not allowed with"),
        (("--json-schema", "@nowhere.json"), "cannot read nowhere.json"),
    ],
)
def test_two_ways_of_saying_it_or_none_that_is_there_is_a_slip(
    story_server: FakeServer, flags: tuple[str, ...], sentence: str, capsys
):
    with pytest.raises(SystemExit):
        generate(story_server, "hi", *flags)
    assert sentence in capsys.readouterr().err


def test_a_broken_stream_is_resumed_for_as_long_as_the_flag_says(fake_server: FakeServer, capsys):
    gone = (grpc.StatusCode.UNAVAILABLE, "the engine went away; send the request again.")
    first, rest = pb.GenerateResponse(token_ids=[5], text="Once"), pb.GenerateResponse(token_ids=[6], text=" upon")
    rest.finish_reason = pb.FINISH_REASON_STOP
    fake_server.inference.parts = [((first,), gone), ((rest,), None)]
    assert generate(fake_server, "hi", "--request-id", "mine", "--reattach-seconds", "30") == 0
    assert capsys.readouterr().out == "Once upon\n"
    assert fake_server.inference.resumptions == [pb.ResumeRequest(request_id="mine", from_tokens=[1])]


def test_a_timeout_that_passes_is_one_sentence_and_exit_1(fake_server: FakeServer, capsys):
    fake_server.inference.endless = True
    assert generate(fake_server, "hi", "--timeout", "0.3") == 1
    assert "did not answer in time" in capsys.readouterr().err
    assert fake_server.inference.cancelled.wait(WAIT_SECONDS)


def test_flags_not_given_leave_the_choice_to_the_model(story_server: FakeServer):
    generate(story_server, "hi")
    assert story_server.inference.requests == [
        pb.GenerateRequest(text="hi", sampling_params=pb.SamplingParams(), num_samples=1)
    ]


def test_a_dash_reads_the_prompt_from_standard_input_unchanged(story_server: FakeServer, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    assert generate(story_server, "-") == 0
    assert story_server.inference.requests[0].text == "two\nlines\n"


def test_the_address_may_come_from_the_environment(story_server: FakeServer, monkeypatch, capsys):
    monkeypatch.setenv("BLOCKPLANE_ADDRESS", story_server.address)
    assert cli.main(["generate", "hi"]) == 0
    assert capsys.readouterr().out == "Once möre\n"


def test_a_refusal_is_one_sentence_and_exit_1(fake_server: FakeServer, capsys):
    fake_server.inference.failure = (grpc.StatusCode.INVALID_ARGUMENT, "max_tokens is 0; ask for at least 1 token.")
    assert generate(fake_server, "hi") == 1
    assert capsys.readouterr() == ("", "blockplane generate: max_tokens is 0; ask for at least 1 token.\n")


def test_a_refusal_says_when_there_may_be_room(fake_server: FakeServer, capsys):
    fake_server.inference.failure = (grpc.StatusCode.RESOURCE_EXHAUSTED, "it is full; retry.")
    fake_server.inference.trailing_metadata = (("grpc-retry-pushback-ms", "1500"),)
    assert generate(fake_server, "hi") == 1
    assert capsys.readouterr().err == "blockplane generate: it is full; retry. (Room is likely in 1.5 s.)\n"


def test_no_server_is_one_sentence_and_exit_1(free_address: str, capsys):
    assert cli.main(["generate", "hi", "--address", free_address]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"blockplane generate: no server answers on {free_address}")


def test_a_bad_setting_is_one_sentence_and_exit_1(monkeypatch, capsys):
    monkeypatch.setenv("BLOCKPLANE_BLOCK_SIZE", "many")
    assert cli.main(["generate", "hi"]) == 1
    assert capsys.readouterr().err == "blockplane generate: block_size is 'many'; give a whole number.\n"


def endless_command(server: FakeServer) -> subprocess.Popen[bytes]:
    server.inference.endless = True
    return subprocess.Popen(
        [*COMMAND, "generate", "hi", "--address", server.address], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_ctrl_c_cancels_the_request_and_is_quiet(fake_server: FakeServer):
    process = endless_command(fake_server)
    assert process.stdout.read(1) == b"x"
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_SECONDS) == 130
    assert process.stderr.read() == b""
    assert fake_server.inference.cancelled.wait(WAIT_SECONDS)
    process.communicate()


def test_a_reader_that_goes_away_ends_the_request_quietly(fake_server: FakeServer):
    process = endless_command(fake_server)
    assert process.stdout.read(1) == b"x"
    process.stdout.close()
    assert process.wait(WAIT_SECONDS) == 141
    assert process.stderr.read() == b""
    assert fake_server.inference.cancelled.wait(WAIT_SECONDS)
    process.stderr.close()


@pytest.mark.parametrize("name", MODULES)
def test_a_process_of_its_own_takes_its_flags_untouched(name: str):
    shown = subprocess.run([*COMMAND, name, "--help"], capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert shown.returncode == 0
    assert f"usage: blockplane {name} [-h]" in shown.stdout
    assert "--stop-with-parent" in shown.stdout


def test_a_process_of_its_own_takes_the_commands_place(monkeypatch):
    became = []
    monkeypatch.setattr(os, "execve", lambda *call: became.append(call) or sys.exit(0))
    with pytest.raises(SystemExit):
        cli.main(["worker", "--model", "synthetic", "--", "-x"])
    path, arguments, _ = became[0]
    assert path == sys.executable
    assert arguments == [sys.executable, "-m", "blockplane.data_plane", "--model", "synthetic", "--", "-x"]


def test_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as exited:
        cli.main(["--version"])
    assert exited.value.code == 0
    assert capsys.readouterr().out == f"blockplane {__version__}\n"


def test_help_of_generate_shows_no_engine_setting(capsys):
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])
    shown = capsys.readouterr().out
    assert "--address" in shown
    assert "--block-size" not in shown


def test_a_slip_in_the_command_of_up_shows_before_anything_starts(monkeypatch, capsys):
    monkeypatch.setattr(cli, "up", lambda *_: pytest.fail("up began"))
    with pytest.raises(SystemExit) as exited:
        cli.main(["up", "--", "generate", "hi", "--max-tokens", "few"])
    assert exited.value.code == 2
    assert "--max-tokens" in capsys.readouterr().err


def test_what_follows_two_dashes_is_the_command_of_up(monkeypatch):
    calls = []
    monkeypatch.setattr(cli, "up", lambda flags, command: calls.append((flags, command)) or 7)
    assert cli.main(["up", "--model", "synthetic", "--", "generate", "hi", "--seed", "3"]) == 7
    flags, command = calls[0]
    assert (flags["model"], command) == ("synthetic", ["generate", "hi", "--seed", "3"])


def test_an_unreadable_configuration_file_is_one_sentence(tmp_path: Path, capsys):
    assert cli.main(["up", "--config", str(tmp_path / "none.toml")]) == 1
    assert capsys.readouterr().err.startswith("blockplane up: cannot read the configuration file")


def test_a_command_starts_without_what_others_draw_and_chat_with():
    script = "import sys, blockplane.client.cli; print({'rich', 'jinja2', 'matplotlib', 'perfetto'} & {*sys.modules})"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert ran.stdout == "set()\n", ran.stderr
