"""The bodies of requests as pydantic models, and their errors.

Unknown fields are refused, except for `IGNORED_FIELDS`. Fields of `NEUTRAL_VALUES` are refused
unless they request what happens anyway. The engine checks the ranges of sampling fields.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, NoReturn, TypeVar

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

from lowroll.engine.base import InFlight
from lowroll.types import MAX_TOP_LOGPROBS, TEMPERATURES, Request

MAX_STOPS = 64
MAX_TOOLS = 2048
DEFAULT_MAX_TOKENS = 16  # as OpenAI's
PauseMode = Literal["keep", "wait", "abort"]
SEED_BITS = 53  # that every JSON reader keeps

Text = Annotated[str, StringConstraints(max_length=1 << 24)]
Name = Annotated[str, StringConstraints(max_length=256)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]  # reports only the first wrong id
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
ScoreTemperature = Annotated[float, Field(ge=TEMPERATURES[0], le=TEMPERATURES[1])]

IGNORED_FIELDS = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prediction "
    "cache_salt priority routed_experts_prompt_start".split()
)
# by field: values that request what happens anyway
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        "tools functions tool_calls tool_call_id annotations refusal suffix audio documents echo "
        "chat_template chat_template_kwargs truncate_prompt_tokens allowed_token_ids bad_words "
        "logits_processors structured_outputs guided_json guided_regex guided_choice "
        "guided_grammar kv_transfer_params vllm_xargs mm_processor_kwargs web_search_options "
        "reasoning_effort verbosity use_beam_search include_stop_str_in_output "
        "continue_final_message continuous_usage_stats prompt_embeds features content_parts add_special_tokens "
        "thinking_token_budget moderation".split(),
        (None, False, [], {}, ""),
    ),
    **dict.fromkeys(("tool_choice", "function_call"), (None, "none", "auto")),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "length_penalty": (None, 1),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "detokenize": (None, True),
}


class Refused(ValueError):
    """A refused request. param: the path of the wrong field in the body ("messages[0].content")."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code

    def body(self) -> dict[str, Any]:
        return error_body(str(self), self.status, self.param, self.code)


def wrong_field(field: str, reason: str, status: int = 400, code: str | None = None) -> Refused:
    """Return the error of a field."""
    return Refused(f"{field}: {reason}", field, status, code)


def too_long(field: str, reason: str) -> Refused:
    """Return the error of a text that exceeds the model's context."""
    return wrong_field(field, reason, code="context_length_exceeded")


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class RequestBody(BaseModel):
    """A JSON object with strict types: "1" is not a number."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        return {k: v for k, v in tree.items() if v is not None or k not in cls.model_fields}

    def check(self) -> None:
        """Refuse combinations of fields that pydantic cannot check."""


class JsonSchema(RequestBody):
    """The schema of a `response_format`; its other fields are documentation."""

    form: dict[str, Any] = Field(alias="schema")
    name: Name = ""
    description: Text | None = None
    strict: bool = True  # has no effect: an answer always follows its schema


class ResponseFormat(RequestBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(RequestBody):
    """vLLM's `structured_outputs`: one of these."""

    form: dict[str, Any] | Text | None = Field(None, alias="json")
    regex: Text | None = None
    choice: list[Text] | None = None
    grammar: Text | None = None
    json_object: bool = False


class StructuredOutputFields(RequestBody):
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | Text | None = None
    guided_regex: Text | None = None
    guided_choice: list[Text] | None = None
    guided_grammar: Text | None = None


class SamplingFields(RequestBody):
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
    stop_token_ids: TokenIds = []
    ignore_eos: bool = False
    seed: int | None = None

    def check(self) -> None:
        super().check()
        self.check_sampling()

    def check_sampling(self, where: str = "") -> None:
        """Refuse invalid token ids and too many stops. where: prefix of the field."""
        for name in self.logit_bias:
            if not re.fullmatch(r"0|[1-9][0-9]{0,9}", name):
                raise wrong_field(f"{where}logit_bias", f"{name!r} is no token id")
        if len(self.stop_strings) > MAX_STOPS:
            raise wrong_field(f"{where}stop", f"{len(self.stop)} strings; {MAX_STOPS} at most")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def to_engine_request(
        self,
        prompt_ids: list[int],
        *,
        max_tokens: int,
        top_logprobs: int,
        request_id: str,
        grammar: str | None = None,
    ) -> Request:
        """Return the engine's request for one prompt. Its default seed is random."""
        bias = tuple((int(name), bias) for name, bias in self.logit_bias.items())
        return Request(
            prompt_ids=prompt_ids,
            n=self.n,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_k=0 if self.top_k == -1 else self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty or None,
            frequency_penalty=self.frequency_penalty or None,
            logit_bias=bias or None,
            stop_ids=tuple(self.stop_token_ids),
            stop_strings=self.stop_strings,
            ignore_eos=self.ignore_eos,
            seed=secrets.randbits(SEED_BITS) if self.seed is None else self.seed,
            id=request_id,
            top_logprobs=top_logprobs,
            grammar=grammar,
        )


class StreamOptions(RequestBody):
    include_usage: bool = False
    include_obfuscation: bool = False  # has no effect


class GenerationFields(RequestBody):
    model: Name | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    request_id: Name = ""

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise wrong_field("stream_options", "stream is not asked for")


class CompletionRequest(SamplingFields, GenerationFields, StructuredOutputFields):
    """The body of POST /v1/completions."""

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(fail_fast=True)]
        | Annotated[list[TokenIds], Field(fail_fast=True)]
    )
    echo: bool = False
    logprobs: TopLogprobs | None = None
    prompt_logprobs: TopLogprobs | None = None
    score_temperature: ScoreTemperature = 1.0
    add_special_tokens: bool = True
    best_of: int | None = None
    packed: bool = False

    def check(self) -> None:
        super().check()
        if self.echo and not isinstance(self.prompt, str):
            _check_ids(self.prompt, "prompt")  # it is decoded before the engine checks it
        if self.best_of not in (None, self.n):
            raise wrong_field("best_of", f"{self.best_of} with n {self.n} is not supported")
        if self.packed:
            self._check_packed()
        if self.max_tokens == 0:
            self._check_without_answer()

    def _check_packed(self) -> None:
        if not self.return_token_ids:
            raise wrong_field("packed", "it goes with return_token_ids: true")
        for field in ("echo", "logprobs", "prompt_logprobs"):
            value = getattr(self, field)
            if value is not None and value is not False:  # 0 also requests log-probs
                raise wrong_field("packed", f"it does not go with {field}")

    def _check_without_answer(self) -> None:
        if not self.echo and self.prompt_logprobs is None:
            raise wrong_field("max_tokens", "0 draws nothing; it goes with echo or prompt_logprobs")
        if self.n != 1:
            raise wrong_field("n", f"a prompt that is scored alone has one answer, not {self.n}")
        if self.stream:
            raise wrong_field("stream", "with max_tokens 0 there is nothing to stream")


class ContentPart(RequestBody):
    type: Literal["text"]
    text: Text


class CalledFunction(RequestBody):
    name: Name
    arguments: Text  # a JSON object


class ToolCall(RequestBody):
    id: Name | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # some clients leave a delta's in


class ChatMessage(RequestBody):
    """A message, whose extra fields go to the chat template."""

    role: Name
    tool_calls: list[ToolCall] | None = None
    content: Annotated[Text | list[ContentPart] | None, Field(validate_default=True)] = None
    name: Name | None = None
    reasoning_content: Text | None = None
    tool_call_id: Name | None = None

    @field_validator("content")
    @classmethod
    def _check_content(cls, content: Any, info: ValidationInfo) -> Any:
        calls = info.data.get("role") == "assistant" and info.data.get("tool_calls")
        if content is None and not calls:
            raise ValueError("text is required, but of an assistant's message with tool_calls")
        return content


class ToolFunction(RequestBody):
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False  # has no effect


class Tool(RequestBody):
    type: Literal["function"]
    function: ToolFunction

    @property
    def schema_shown(self) -> dict[str, Any]:
        function = self.function.model_dump(exclude_unset=True, exclude={"strict"})
        return {"type": "function", "function": function}


class ConversationFields(RequestBody):
    add_generation_prompt: bool = True
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = []
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(SamplingFields, GenerationFields, StructuredOutputFields, ConversationFields):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None
    prompt_logprobs: TopLogprobs | None = None
    score_temperature: ScoreTemperature = 1.0
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong_field("top_logprobs", "it goes with logprobs: true")
        other = self.max_completion_tokens
        if other is not None and self.max_tokens not in (None, other):
            raise wrong_field(
                "max_tokens", f"{self.max_tokens}, and max_completion_tokens is {other}"
            )


class SamplingParams(SamplingFields):
    skip_special_tokens: bool = True  # has no effect
    logprobs: TopLogprobs | None = None
    prompt_logprobs: TopLogprobs | None = None


class GenerateRequest(GenerationFields):
    """The body of POST /inference/v1/generate."""

    token_ids: TokenIds
    sampling_params: SamplingParams = SamplingParams()

    def check(self) -> None:
        super().check()
        self.sampling_params.check_sampling("sampling_params.")


class TokenizeRequest(ConversationFields):
    """The body of POST /tokenize."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    def check(self) -> None:
        super().check()
        if (self.prompt is None) == (self.messages is None):
            raise wrong_field("prompt", "expected prompt or messages, one of the two")
        if self.messages is not None and self.add_special_tokens:
            raise wrong_field("add_special_tokens", "the chat template has them")


class DetokenizeRequest(RequestBody):
    """The body of POST /detokenize."""

    model: Name | None = None
    tokens: TokenIds

    def check(self) -> None:
        _check_ids(self.tokens, "tokens")


class ControlBody(RequestBody):
    """A body or query without extra fields."""

    model_config = ConfigDict(extra="forbid")


class PauseQuery(ControlBody):
    mode: PauseMode = "keep"


class WeightsRequest(ControlBody):
    """The body of POST /weights."""

    version: str
    in_flight: InFlight = "keep"


ENGINE_FIELDS = {
    "prompt_ids": "prompt",
    "stop_ids": "stop_token_ids",
    "stop_strings": "stop",
    "id": "request_id",
    "top_logprobs": "logprobs",
}
CHAT_ENGINE_FIELDS = ENGINE_FIELDS | {"prompt_ids": "messages", "top_logprobs": "top_logprobs"}
GENERATE_ENGINE_FIELDS = {
    name: f"sampling_params.{ENGINE_FIELDS.get(name, name)}"
    for name in [*SamplingFields.model_fields, "stop_ids", "stop_strings", "top_logprobs"]
} | {"prompt_ids": "token_ids", "id": "request_id"}
ROUTES: dict[str, type[RequestBody]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/inference/v1/generate": GenerateRequest,
}

B = TypeVar("B", bound=RequestBody)


def parse_request(
    tree: dict[str, Any],
    kind: type[B],
    check_model: Callable[[str | None], None] = lambda name: None,
) -> B:
    """Return the validated body, or raise Refused. check_model: called before combinations of
    fields are checked."""
    try:
        body = kind.model_validate(tree)
    except ValidationError as error:
        if error.errors()[0]["type"] == "missing":  # it may have another name
            _check_names(kind, tree, "")
        raise _to_refused(error) from None
    _check_extra(body, "")
    check_model(getattr(body, "model", None))
    body.check()
    return body


def refuse_engine_error(error: ValueError, names: Mapping[str, str]) -> NoReturn:
    """Raise the engine's refusal, "field: reason", under the client's name."""
    text = str(error)
    match = re.match(r"(\w+)((?:\[\d+\])*): ", text)
    if match is None:
        raise Refused(text) from None
    field = names.get(match[1], match[1]) + match[2]
    code = "context_length_exceeded" if "over the model's context" in text else None
    raise wrong_field(field, text[match.end() :], code=code) from None


def _check_ids(ids: Iterable[int | Text | TokenIds], where: str) -> None:
    for i, item in enumerate(ids):
        if isinstance(item, list):
            _check_ids(item, f"{where}[{i}]")
        elif isinstance(item, int) and not 0 <= item < 1 << 31:
            raise wrong_field(f"{where}[{i}]", f"expected a token id, got {item}")


def _check_extra(body: RequestBody, where: str) -> None:
    extra_fields = body.model_extra or {}
    _check_names(type(body), extra_fields, where)
    for name, value in extra_fields.items():
        if name not in IGNORED_FIELDS and not _is_neutral(name, value):
            raise wrong_field(f"{where}{name}", "not supported by this server", code="unsupported")
    for name, value in body:
        if isinstance(value, RequestBody):
            _check_extra(value, f"{where}{name}.")
        elif isinstance(value, list):
            for i, item in enumerate(value):
                if not isinstance(item, RequestBody):
                    break  # all items are of one kind
                _check_extra(item, f"{where}{name}[{i}].")


def _check_names(kind: type[RequestBody], names: Iterable[str], where: str) -> None:
    known_names = (*kind.model_fields, *NEUTRAL_VALUES, *IGNORED_FIELDS)
    for name in names:
        if name in known_names:
            continue
        routes = [route for route, body in ROUTES.items() if name in body.model_fields]
        hint = ""
        if routes and not where:
            hint = f"; it is one of {routes[0]}"
        elif similar_names := get_close_matches(name, known_names, 1):
            hint = f"; did you mean {similar_names[0]}?"
        shown_name = name
        if len(name) > 64 or not name.isprintable():
            shown_name = ascii(name[:12])[1:-1] + "..."
        reason = f"there is no such field{hint}"
        raise wrong_field(f"{where}{shown_name}", reason, code="unknown_field")


def _to_refused(error: ValidationError) -> Refused:
    """Return the refusal of the first invalid field. For a union, pydantic reports an error for
    each type; the longest path is of the best type."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first_field = errors[0]["loc"][0]
    reasons_by_path: dict[str, list[str]] = {}
    for detail in errors:
        if detail["loc"][0] == first_field:
            reason = _plain_reason(detail["type"], detail["msg"])
            reasons_by_path.setdefault(_body_path(detail["loc"]), []).append(reason)
    path = max(reasons_by_path, key=lambda path: (len(path), path))
    reasons = dict.fromkeys(reasons_by_path[path])
    return wrong_field(path, ", or ".join(reason[:1].lower() + reason[1:] for reason in reasons))


def _plain_reason(kind: str, message: str) -> str:
    if kind == "model_type":
        return "an object is expected"
    if kind == "extra_forbidden":
        return "there is no such field"
    return message.removeprefix("Value error, ") if kind == "value_error" else message


def _body_path(loc: tuple[int | str, ...]) -> str:
    path = str(loc[0])
    for part in loc[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int"):
            path += f".{part}"
    return path


def _is_neutral(name: str, value: Any) -> bool:
    if type(value) is float and value.is_integer():
        value = int(value)
    return any(
        type(value) is type(neutral) and value == neutral for neutral in NEUTRAL_VALUES[name]
    )
