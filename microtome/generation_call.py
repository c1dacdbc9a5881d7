"""What the two clients share of a generation: which message to send next, and what each thing that comes means.

A stream that breaks is gone on with: before its first message by asking again, after it by `Resume` from the tokens
that have come, and where the service has lost the generation by asking again with those tokens. So the updates handed
on are a generation's tokens, each once and in order, whatever broke in between; of several completions each goes on
from its own last token, and those that have ended are left out. In a session nothing is asked again: a generation there
that cannot be resumed fails, and the session's length says what it has left behind.
Waits for nothing; one thread at a time uses it.
"""

import uuid
from dataclasses import replace

import grpc

from microtome.answers import Completion, FinishReason, Update, completion_of, update_of
from microtome.call import Call, Contact, RpcFailure
from microtome.errors import ServiceFailed, Unavailable
from microtome.retry import Retry
from microtome.v1 import generation_pb2 as pb


class _Part:
    """What has come of one completion."""

    __slots__ = ("last", "offset", "prompt_at", "seed", "updates")

    def __init__(self, offset: int) -> None:
        self.offset = offset  # tokens the caller has
        self.updates: list[Update] = []  # of this call
        self.prompt_at = 0  # tokens of the prompt of which the caller knows how likely they are
        self.seed: int | None = None  # the one in force, once a message has come
        self.last: Update | None = None  # the one with the finish reason

    def add(self, update: Update) -> None:
        self.offset += len(update.token_ids)
        self.updates.append(update)
        self.prompt_at += len(update.prompt_token_ids)
        self.seed = update.seed
        if update.finish_reason is not None:
            self.last = update

    def joined(self) -> Completion | None:
        """None: it has not ended."""
        if self.last is None or self.last.usage is None:
            return None
        return completion_of(self.updates)

    @property
    def tokens(self) -> list[int]:
        """Of this call."""
        return [token for update in self.updates for token in update.token_ids]


class GenerationCall(Call):
    """One call of `generate` (`request`: what to ask) or of `resume` (a `ResumeRequest`: where to go on)."""

    def __init__(
        self,
        request: pb.GenerateRequest | pb.ResumeRequest,
        address: str,
        retry: Retry,
        timeout_s: float | None,
        contact: Contact | None = None,
    ) -> None:
        super().__init__(address, retry, timeout_s, contact)
        self._request = request
        self._parts: dict[int, _Part] = {}  # by index; empty: how many there are is not known before a message comes
        self._several = False
        if isinstance(request, pb.GenerateRequest):
            self._expect(request.n or 1)
        elif request.offsets:
            self._parts = {place.index: _Part(place.offset) for place in request.offsets}
            self._several = True
        self._resuming = isinstance(request, pb.ResumeRequest)
        self._lost: Unavailable | None = None  # what broke the stream we are to go on with
        self.finished = False  # every completion's message with the finish reason has come
        self._minted = not request.generation_id
        if self._minted:
            request.generation_id = uuid.uuid4().hex

    @property
    def generation_id(self) -> str:
        return self._request.generation_id

    @property
    def outlives_its_stream(self) -> bool:
        """Whether hanging up leaves the generation running, so that ending it takes a `Cancel`."""
        return isinstance(self._request, pb.ResumeRequest) or self._request.resumable

    def next_attempt(self) -> tuple[str, pb.GenerateRequest | pb.ResumeRequest]:
        """The method to call now, and its request."""
        if not self._resuming or not self._parts:
            return ("Resume" if self._resuming else "Generate"), self._request
        if not self._several:
            return "Resume", pb.ResumeRequest(generation_id=self.generation_id, offset=self._parts[0].offset)
        offsets = [pb.CompletionOffset(index=index, offset=part.offset) for index, part in self._missing]
        return "Resume", pb.ResumeRequest(generation_id=self.generation_id, offsets=offsets)

    @property
    def completions(self) -> tuple[Completion, ...]:
        """Those that have ended, by index, as far as this call has brought them."""
        joined = (part.joined() for _, part in sorted(self._parts.items()))
        return tuple(completion for completion in joined if completion is not None)

    def received(self, message: pb.GenerateResponse) -> Update:
        """The message as an update. Raises ServiceFailed when it does not go on where the last one ended."""
        self.answered()
        update = update_of(message)
        if not self._parts:
            self._expect(message.n or 1)
        part = self._parts.get(update.index)
        if part is None or part.last is not None:
            known = "has ended" if part is not None else "was not asked for"
            raise ServiceFailed(
                f"the service at {self._address} sent of completion {update.index}, which {known}", "OK"
            )
        if update.offset != part.offset:
            raise ServiceFailed(
                f"the service at {self._address} went on at token {update.offset}, not at {part.offset}", "OK"
            )
        if self._lost is not None and update.finish_reason is FinishReason.CANCELLED and not self.outlives_its_stream:
            raise self._lost  # the break itself has cancelled it
        if update.prompt_offset > part.prompt_at:
            raise ServiceFailed(
                f"the service at {self._address} told of the prompt from token {update.prompt_offset} on, not from "
                f"{part.prompt_at}",
                "OK",
            )
        if known_already := min(part.prompt_at - update.prompt_offset, len(update.prompt_token_ids)):
            # It began anew before its first token, and tells of the prompt once more.
            update = replace(
                update,
                prompt_token_ids=update.prompt_token_ids[known_already:],
                prompt_logprobs=update.prompt_logprobs[known_already:],
                prompt_offset=update.prompt_offset + known_already,
            )
        self._failures = 0
        part.add(update)
        self._resuming = True
        self.finished = not self._missing
        return update

    def failed(self, failure: RpcFailure) -> float:
        """Seconds to wait before `next_attempt`. Raises what the caller is told, when there is to be none."""
        error = self.error_of(failure)
        code = failure.code()
        if self._lost is not None and code is grpc.StatusCode.NOT_FOUND and self._began:
            if isinstance(self._request, pb.ResumeRequest) or self._in_session:
                raise self._lost  # the generation has ended with its stream, or is kept no longer
            self._start_over_behind_what_came(self._request)
            return 0.0
        if self._lost is not None and code is grpc.StatusCode.ALREADY_EXISTS and not self._resuming:
            self._resuming = True  # an attempt that seemed lost had arrived
            return 0.0
        wait_s = self._wait_s(self._patience(failure))
        if not isinstance(error, Unavailable):
            raise error
        if self._lost is None or self._failures == 1:
            self._lost = error  # what broke the stream says more than why it could not be gone on with
        if wait_s is None:
            raise self._lost
        if not self._resuming and self._minted and not self.outlives_its_stream:
            self._request.generation_id = uuid.uuid4().hex  # what may have arrived is ended by the hang-up
        return wait_s

    def ended(self) -> None:
        """The stream ended without an error. Raises ServiceFailed when the last message was none."""
        if not self.finished:
            raise ServiceFailed(f"the service at {self._address} ended the stream without a finish reason", "OK")

    def _expect(self, n: int) -> None:
        offset = self._request.offset if isinstance(self._request, pb.ResumeRequest) else 0
        self._parts = {index: _Part(offset) for index in range(n)}
        self._several = n > 1

    @property
    def _missing(self) -> list[tuple[int, _Part]]:
        """Those that have not ended."""
        return [(index, part) for index, part in self._parts.items() if part.last is None]

    def _start_over_behind_what_came(self, request: pb.GenerateRequest) -> None:
        """The service has lost the generation: what it needs to go on is what was asked, the seed and the tokens."""
        request.generation_id = uuid.uuid4().hex
        self._resuming = False
        if not self._tokens:
            return
        if not self._several:
            (part,) = self._parts.values()
            if part.seed is not None:
                request.seed = part.seed
            request.generated_token_ids[:] = part.tokens
            return
        del request.begun[:]
        for index, part in self._missing:
            request.begun.add(index=index, seed=part.seed, token_ids=part.tokens)

    def _patience(self, failure: RpcFailure) -> int:
        attempts = super()._patience(failure)
        if self._resuming:
            return self._retry.resume_attempts
        # What seemed lost may have arrived, and has left its prompt in the session's history: never there twice.
        return 1 if self._in_session else attempts

    @property
    def _in_session(self) -> bool:
        return isinstance(self._request, pb.GenerateRequest) and bool(self._request.session_id)

    @property
    def _tokens(self) -> int:
        """Of this call, that have come."""
        return sum(len(update.token_ids) for part in self._parts.values() for update in part.updates)

    @property
    def _began(self) -> bool:
        """Whether the generation is known to have existed."""
        return bool(self._tokens) or isinstance(self._request, pb.GenerateRequest)

    def _so_far(self) -> str:
        tokens = self._tokens
        if not tokens:
            return ""
        return "1 token" if tokens == 1 else f"{tokens} tokens"
