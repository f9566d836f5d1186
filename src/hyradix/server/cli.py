"""The ``hyradix`` command.

Owns: commands and their options. Does not know: how any of it is done.
Invariants: errors of the user are one line on stderr and exit code 2; ``--help`` and ``serve``
never load torch in this process (the engine has its own; see ``offline_llm``).
Read next: ``options.py``, ``launch.py``, ``terminal.py``, ``bench.py``,
``memory.py``.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

import hyradix
from hyradix.config import Settings
from hyradix.errors import HyradixError
from hyradix.request import SamplingParams
from hyradix.server import bench
from hyradix.server.launch import EXIT_KILLED, EXIT_USAGE, ServeOptions, run_server
from hyradix.server.memory import memory
from hyradix.server.options import with_settings
from hyradix.server.terminal import HttpBackend, OfflineBackend, chat_loop, print_stream
from hyradix.server.text import load_text

with contextlib.suppress(ImportError):  # not in every Python
    import readline  # noqa: F401  (gives input() line editing and history)

if TYPE_CHECKING:
    from hyradix.engine.llm import LLM

app = typer.Typer(
    name="hyradix",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serve hybrid language models with one prefix cache for attention and recurrent state.",
)
app.add_typer(bench.app)
app.command()(memory)

MaxTokens = Annotated[int, typer.Option(help="Longest reply, in tokens.")]
Temperature = Annotated[float, typer.Option(help="0: always the likeliest token.")]


def main() -> None:
    """Run the command line; our own errors become one line and exit code 2."""
    try:
        app()
    except HyradixError as error:
        print(f"hyradix: error: {error.message}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    except KeyboardInterrupt:
        sys.exit(EXIT_KILLED)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"hyradix {hyradix.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options of ``hyradix`` itself."""


@app.command()
@with_settings
def serve(
    settings: Settings,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port to listen on; 0: any free one.")
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(help="Key that clients must send.", envvar="HYRADIX_API_KEY"),
    ] = None,
    max_body_mib: Annotated[int, typer.Option(min=1, help="Largest request body, in MiB.")] = 32,
    cors: Annotated[
        list[str] | None,
        typer.Option(help="Origin of web pages that may call this server, or '*'; repeatable."),
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve a model over HTTP, with OpenAI's API."""
    options = ServeOptions(
        settings=settings,
        host=host,
        port=port,
        api_key=api_key,
        max_body_mib=max_body_mib,
        cors_origins=tuple(cors or ()),
        log_level=log_level,
    )
    raise typer.Exit(run_server(options, load_text))


@app.command()
@with_settings
def generate(
    settings: Settings,
    prompt: Annotated[str, typer.Argument(help="Text to continue; with --chat, to answer.")],
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 1.0,
    chat: Annotated[bool, typer.Option("--chat", help="Send it as a chat message.")] = False,
) -> None:
    """Continue a prompt, without a server."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=settings.seed)
    sampling.validate()
    backend = OfflineBackend(offline_llm(settings), sampling)
    messages = [{"role": "user", "content": prompt}]
    print_stream(backend.reply(messages) if chat else backend.continue_text(prompt), sys.stdout)
    print()


@app.command()
@with_settings
def chat(
    settings: Settings,
    url: Annotated[
        str | None, typer.Option(help="Address of a running server, such as http://127.0.0.1:8000.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="The server's key.", envvar="HYRADIX_API_KEY")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 1.0,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show cached tokens after each reply.")
    ] = False,
) -> None:
    """Chat in the terminal. Ctrl-D ends, Ctrl-C cuts a reply short."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    sampling.validate()
    backend: HttpBackend | OfflineBackend
    if url is not None:
        backend = HttpBackend(url, sampling, api_key=api_key)
    else:
        backend = OfflineBackend(offline_llm(settings), sampling)
    chat_loop(backend, system=system, is_verbose=verbose, read_line=input, out=sys.stdout)


def offline_llm(settings: Settings) -> LLM:
    """An engine in this process. The one place where the command line loads torch."""
    options: dict[str, Any] = {
        name: getattr(settings, name) for name in settings.__slots__ if name != "model"
    }
    return hyradix.LLM(settings.model, **options)
