"""The `blockplane generate` sub-command: one request, told on the terminal. Knows no gRPC."""

import argparse

from blockplane.client.connect import SETTINGS, connect
from blockplane.client.request_flags import add_request_flags, request_arguments
from blockplane.client.subcommand import Subcommand
from blockplane.client.terminal import print_json, print_samples, print_text, read_prompt
from blockplane.protos.config import add_settings


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="the text to continue; - = standard input, unchanged")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, with token ids")
    parser.add_argument("--num-samples", type=int, metavar="N", help="continuations of the prompt (default: 1)")
    parser.add_argument(
        "--truncate-prompt-tokens", type=int, metavar="N", help="use the prompt's last N tokens (default: all)"
    )
    parser.add_argument("--whole-output", action="store_true", help="print nothing before it has ended")
    parser.add_argument("--priority", type=int, metavar="N", help="less comes first (default: 0)")
    parser.add_argument("--skip-prefix-cache", action="store_true", help="neither use cached prefixes nor leave any")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after so long (default: never)")
    parser.add_argument("--request-id", metavar="ID", help="unique among live requests (default: drawn)")
    parser.add_argument(
        "--reattach-seconds", type=float, metavar="SECONDS", help="resume a broken stream for so long (default: 0)"
    )
    add_request_flags(parser)
    _add_special_tokens(parser)
    told = parser.add_argument_group("what --json tells besides")
    told.add_argument("--logprobs", type=int, metavar="N", help="of each output token, and of the N likeliest there")
    told.add_argument("--prompt-logprobs", type=int, metavar="N", help="the same of the prompt's tokens")
    add_settings(parser, names=SETTINGS)


def _add_special_tokens(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("special tokens")
    group.add_argument(
        "--special-tokens",
        action="store_false",
        dest="skip_special_tokens",
        default=None,
        help="print them, too (default: leave them out)",
    )
    group.add_argument(
        "--no-spaces-between-special-tokens",
        action="store_false",
        dest="spaces_between_special_tokens",
        default=None,
        help="leave out the space that the tokenizer may put between two",
    )
    group.add_argument(
        "--no-bos",
        action="store_false",
        dest="add_special_tokens",
        default=None,
        help="put no BOS token before the prompt, which spells its own if it wants one",
    )


def generate(flags: argparse.Namespace) -> int:
    """Print the continuations. Returns the exit status.

    Raises:
        BlockplaneError: the request failed.
    """
    arguments = request_arguments(flags)
    show = print_json if flags.json else print_samples if arguments.get("num_samples", 1) > 1 else print_text
    with connect(vars(flags)) as client:
        show(client.generate(read_prompt(flags.prompt), **arguments))
    return 0


COMMAND = Subcommand("generate", "continue a prompt", "Continues a prompt.", add_flags, generate)
