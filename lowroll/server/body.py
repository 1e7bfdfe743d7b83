"""What a client may say: the bodies of requests, checked before anything is done.

Three kinds of fields. Those of the classes below do what they say. Those of `IDLE` are known, and
are refused unless they ask for what happens anyway. Those of `HEEDLESS` change no answer of this
server and are accepted. Any other is refused, with the nearest known name.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from lowroll.server.errors import Refused
from lowroll.types import MAX_TOP_LOGPROBS, TEMPERATURES

MOST_STOPS = 64
MOST_TOOLS = 2048
DEFAULT_MAX_TOKENS = 16  # of a completion, as OpenAI's

Text = Annotated[str, StringConstraints(max_length=1 << 24)]
Name = Annotated[str, StringConstraints(max_length=256)]
Ids = Annotated[list[int], Field(fail_fast=True)]  # of many that are wrong one is told
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]

HEEDLESS = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prediction "
    "cache_salt priority routed_experts_prompt_start".split()
)
_OFF: tuple[Any, ...] = (None, False, [], {}, "")
# by name: the values that ask for nothing that is not there
IDLE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        "tools functions tool_calls tool_call_id annotations refusal suffix audio documents echo "
        "chat_template chat_template_kwargs truncate_prompt_tokens allowed_token_ids bad_words "
        "logits_processors structured_outputs guided_json guided_regex guided_choice "
        "guided_grammar kv_transfer_params vllm_xargs mm_processor_kwargs web_search_options "
        "reasoning_effort verbosity use_beam_search include_stop_str_in_output "
        "continue_final_message continuous_usage_stats prompt_embeds features content_parts add_special_tokens "
        "thinking_token_budget moderation".split(),
        _OFF,
    ),
    **dict.fromkeys(("tool_choice", "function_call"), (None, "none", "auto")),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "length_penalty": (None, 1),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "detokenize": (None, True),
}


class Body(BaseModel):
    """A JSON object, by the letter: "1" is no number."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _said(cls, tree: Any) -> Any:
        """null stands for a field that is not said."""
        if not isinstance(tree, dict):
            return tree
        return {k: v for k, v in tree.items() if v is not None or k not in cls.model_fields}


class JsonSchema(Body):
    """Of `response_format`; its other fields are for people."""

    form: dict[str, Any] = Field(alias="schema")
    name: Name = ""
    description: Text | None = None
    strict: bool = True  # an answer is held to its schema whatever this says


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Structured(Body):
    """vLLM's `structured_outputs`: one of these."""

    form: dict[str, Any] | Text | None = Field(None, alias="json")
    regex: Text | None = None
    choice: list[Text] | None = None
    grammar: Text | None = None
    json_object: bool = False


class Formed(Body):
    """What an answer must be; its `grammars`."""

    response_format: ResponseFormat | None = None
    structured_outputs: Structured | None = None
    guided_json: dict[str, Any] | Text | None = None
    guided_regex: Text | None = None
    guided_choice: list[Text] | None = None
    guided_grammar: Text | None = None


class Sampling(Body):
    """How tokens are drawn. Ranges are the engine's to check."""

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and vLLM's -1 are off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}  # by token id
    stop: str | Annotated[list[str], Field(fail_fast=True)] = []
    stop_token_ids: Ids = []
    ignore_eos: bool = False
    seed: int | None = None


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding that hides lengths from who listens: none is sent


class Answered(Body):
    """What any request that draws text may say beside its prompt."""

    model: Name | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    request_id: Name = ""


class Completion(Sampling, Answered, Formed):
    """POST /v1/completions"""

    prompt: (
        Text
        | Ids
        | Annotated[list[Text], Field(fail_fast=True)]
        | Annotated[list[Ids], Field(fail_fast=True)]
    )
    echo: bool = False
    logprobs: TopLogprobs | None = None
    prompt_logprobs: TopLogprobs | None = None
    score_temperature: Annotated[float, Field(ge=TEMPERATURES[0], le=TEMPERATURES[1])] = 1.0
    add_special_tokens: bool = True
    best_of: int | None = None
    packed: bool = False


class Part(Body):
    type: Literal["text"]
    text: Text


class Called(Body):
    name: Name
    arguments: Text  # a JSON object


class ToolCall(Body):
    """One of an assistant's earlier turns."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: Called
    index: int | None = None  # of a delta, which some clients leave in


class Message(Body):
    """One turn of a conversation. What else it says goes to the chat template."""

    role: Name
    tool_calls: list[ToolCall] | None = None
    content: Annotated[Text | list[Part] | None, Field(validate_default=True)] = None
    name: Name | None = None
    reasoning_content: Text | None = None
    tool_call_id: Name | None = None

    @field_validator("content")
    @classmethod
    def _has_content(cls, content: Any, said: ValidationInfo) -> Any:
        """ValueError for a turn that says nothing, but for an assistant's calls of tools."""
        calls = said.data.get("role") == "assistant" and said.data.get("tool_calls")
        if content is None and not calls:
            raise ValueError("text is required, but of an assistant's message with tool_calls")
        return content


class Function(Body):
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None  # their JSON schema
    strict: bool = False  # calls are drawn as everything is, whatever this says


class Tool(Body):
    type: Literal["function"]
    function: Function

    @property
    def schema_shown(self) -> dict[str, Any]:
        """What chat templates show of it."""
        shown = self.function.model_dump(exclude_unset=True, exclude={"strict"})
        return {"type": "function", "function": shown}


class Chat(Sampling, Answered, Formed):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None
    prompt_logprobs: TopLogprobs | None = None
    score_temperature: Annotated[float, Field(ge=TEMPERATURES[0], le=TEMPERATURES[1])] = 1.0
    add_generation_prompt: bool = True
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] | None = None  # variables of the template


class SamplingParams(Sampling):
    skip_special_tokens: bool = True  # no text is made
    logprobs: TopLogprobs | None = None
    prompt_logprobs: TopLogprobs | None = None


class Generate(Answered):
    """POST /inference/v1/generate"""

    token_ids: Ids
    sampling_params: SamplingParams = SamplingParams()


class Tokenize(Body):
    """POST /tokenize"""

    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] = []
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class Detokenize(Body):
    """POST /detokenize"""

    model: Name | None = None
    tokens: Ids


ROUTES: dict[str, type[Body]] = {
    "/v1/completions": Completion,
    "/v1/chat/completions": Chat,
    "/inference/v1/generate": Generate,
}

B = TypeVar("B", bound=Body)


def check(tree: dict[str, Any], kind: type[B]) -> B:
    """A body of this kind from its JSON. Refused names the field."""
    try:
        body = kind.model_validate(tree)
    except ValidationError as error:
        if error.errors()[0]["type"] == "missing":  # it may be there under another name
            _check_names(kind, tree, "")
        raise _refusal(error) from None
    _check_extra(body, "")
    return body


def stops(body: Sampling) -> tuple[str, ...]:
    """The stop strings."""
    given = [body.stop] if isinstance(body.stop, str) else body.stop
    if len(given) > MOST_STOPS:
        raise Refused(f"stop: {len(given)} strings; {MOST_STOPS} at most", "stop")
    return tuple(given)


def _check_extra(body: Body, where: str) -> None:
    """Refuse what the body asks for and does not get, in what lies within it too."""
    extra = body.model_extra or {}
    _check_names(type(body), extra, where)
    for name, value in extra.items():
        if name not in HEEDLESS and not _idle(name, value):
            path = f"{where}{name}"
            raise Refused(f"{path}: not supported by this server", path, code="unsupported")
    for name, value in body:
        if isinstance(value, Body):
            _check_extra(value, f"{where}{name}.")
        elif isinstance(value, list):
            for i, one in enumerate(value):
                if not isinstance(one, Body):
                    break
                _check_extra(one, f"{where}{name}[{i}].")


def _check_names(kind: type[Body], names: Iterable[str], where: str) -> None:
    """Refuse the first name that no field has, with the route that has it, or the nearest name."""
    known = (*kind.model_fields, *IDLE, *HEEDLESS)
    for name in names:
        if name in known:
            continue
        path = f"{where}{_show(name)}"
        routes = [route for route, other in ROUTES.items() if name in other.model_fields]
        hint = f"; it is one of {routes[0]}" if routes and not where else ""
        if not hint and (near := get_close_matches(name, known, 1)):
            hint = f"; did you mean {near[0]}?"
        raise Refused(f"{path}: there is no such field{hint}", path, code="unknown_field")


def _refusal(error: ValidationError) -> Refused:
    """One thing that is wrong: where a field may be several things, of the one that came furthest."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    mine = [
        (_path(one["loc"]), _reason(one["type"], one["msg"]))
        for one in errors
        if one["loc"][0] == errors[0]["loc"][0]
    ]
    path = max((where for where, _ in mine), key=lambda where: (len(where), where))
    reasons = dict.fromkeys(reason for where, reason in mine if where == path)
    return Refused(
        f"{path}: {', or '.join(reason[:1].lower() + reason[1:] for reason in reasons)}", path
    )


def _reason(kind: str, message: str) -> str:
    """Why a field is wrong, without words of pydantic's own."""
    if kind == "model_type":
        return "an object is expected"
    return message.removeprefix("Value error, ") if kind == "value_error" else message


def _path(loc: tuple[int | str, ...]) -> str:
    """A place in the body. Pydantic puts names of types between the fields: those are left out."""
    path = str(loc[0])
    for part in loc[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int"):
            path += f".{part}"
    return path


def _idle(name: str, value: Any) -> bool:
    """Whether a value of a known field asks for nothing."""
    if type(value) is float and value.is_integer():
        value = int(value)
    return any(type(value) is type(idle) and value == idle for idle in IDLE[name])


def _show(name: str) -> str:
    """A field's name of a client, in an answer to it."""
    return name if len(name) <= 64 and name.isprintable() else ascii(name[:12])[1:-1] + "..."
