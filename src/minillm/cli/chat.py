"""`minillm chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from minillm.cli import console
from minillm.cli.options import ENGINE, SAMPLING, Options, with_options
from minillm.cli.session import Message, follow, has_chat_template, open_runtime, sampling_params, summary
from minillm.core.errors import ConfigError, RequestError, RequestFailedError

_HELP = "/reset starts over, /system TEXT sets the system message, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


@with_options(sampling=SAMPLING, engine=ENGINE)
def chat(
    engine: Options,
    sampling: Options,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Talk with the server at this address, as http://127.0.0.1:8000; load nothing here."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, help="Key for --url.", show_default=False)
    ] = None,
) -> None:
    """Talk with a model. /reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer."""
    sampling_params(sampling)
    if url is not None:
        _chat_with_server(url, api_key, engine, sampling, system)
        return
    with open_runtime(engine) as runtime:
        if not has_chat_template(runtime):
            raise ConfigError(f"model={runtime.config.model!r} has no chat template; give one with --chat-template")
        params = sampling_params(sampling, runtime)
        console.info(_HELP)
        Conversation(lambda messages, write: summary(follow(runtime, messages, params, write)), system).run()


def _chat_with_server(url: str, api_key: str | None, engine: Options, sampling: Options, system: str | None) -> None:
    from minillm.cli.remote import RemoteModel

    if set(engine) - {"model"}:
        raise ConfigError(
            f"{', '.join(sorted(set(engine) - {'model'}))}: an option of an engine does not go with --url"
        )
    remote = RemoteModel(url, engine.get("model"), api_key)
    console.info(f"{remote.model} at {url}; {_HELP}")
    Conversation(lambda messages, write: remote.stream(messages, sampling, write), system).run()


class Conversation:
    """The messages so far, and the loop that reads lines and streams answers.

    `answer` is given the messages and a function for each piece of text, and returns a line about the answer.
    """

    def __init__(self, answer: Callable[[list[Message], Callable[[str], None]], str], system: str | None) -> None:
        self._stream = answer
        self._system = system
        self.messages: list[Message] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def run(self) -> None:
        """Until /exit or the end of input; KeyboardInterrupt at the prompt goes through."""
        while True:
            try:
                line = self._read()
            except EOFError:
                return
            if line.startswith("/"):
                if not self._command(line):
                    return
            elif line:
                self._answer(line)

    def _read(self) -> str:
        if sys.stdin.isatty():
            import readline  # noqa: F401  (line editing and history for input())

            return input("> ").strip()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.strip()

    def _command(self, line: str) -> bool:
        """Carry out a line that starts with a slash; False ends the conversation."""
        name, _, argument = line.partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if name == "/reset":
            self.reset()
            console.info("started over")
        elif name == "/system":
            self._system = argument.strip() or None
            self.reset()
            console.info("system message set, started over")
        else:
            console.info(_HELP)
        return True

    def _answer(self, line: str) -> None:
        self.messages.append({"role": "user", "content": line})
        pieces: list[str] = []

        def write(text: str) -> None:
            pieces.append(text)
            sys.stdout.write(text)
            sys.stdout.flush()

        try:
            note = self._stream(list(self.messages), write)
        except KeyboardInterrupt:
            note = "stopped"
        except (RequestError, RequestFailedError) as error:
            self.messages.pop()
            console.print_error(f"{error} (/reset starts over)")
            return
        sys.stdout.write("\n")
        sys.stdout.flush()
        console.info(note)
        self.messages.append({"role": "assistant", "content": "".join(pieces)})
