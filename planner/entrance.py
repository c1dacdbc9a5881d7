"""Whether a generation may come in: its numbers against the model and the workers, its time, and the room in line.

Checks only: whoever is refused has changed nothing.
"""

from microtome.planner.config import PlannerConfig
from microtome.planner.errors import AtCapacity, BadInput, DeadlineExpired
from microtome.planner.generations import check_vocabulary
from microtome.planner.models import Models
from microtome.planner.outlook import RETRY_MAX_MS, Outlook
from microtome.planner.roster import Roster
from microtome.planner.served import Served
from microtome.planner.types import GenerationOptions


class Entrance:
    def __init__(self, config: PlannerConfig, roster: Roster, models: Models, outlook: Outlook) -> None:
        self._config = config
        self._roster = roster
        self._models = models
        self._outlook = outlook

    def check(
        self,
        served: Served,
        history: int,
        prompt: tuple[int, ...],
        options: GenerationOptions,
        count: int,
        held: int,
        now_us: int,
    ) -> None:
        """For `count` generations of one prompt behind `history` tokens, the first `held` of which lie on a worker.

        Raises `BadInput`, `DeadlineExpired`, or `AtCapacity`.
        """
        length = history + len(prompt)
        self.check_limits(served, length, prompt, options)
        self._check_time(length - held, options, now_us)
        served.line.check_room(count, count * len(prompt), self._outlook.retry_after_ms())

    def check_limits(self, served: Served, length: int, prompt: tuple[int, ...], options: GenerationOptions) -> None:
        """Against the roomiest worker; with none there, the configuration, and again when one joins."""
        if served.vocab_size is not None:
            check_vocabulary(prompt, options, served.vocab_size)
        limit = self._context(served)
        if limit is None:
            return
        if length + 1 > limit:
            raise BadInput(f"a history of {length} tokens and 1 more do not fit a context of {limit} tokens")
        if length + options.max_new_tokens > limit:
            raise BadInput(
                f"max_new_tokens {options.max_new_tokens} after {length} tokens exceed a context of {limit} tokens"
            )

    def room(self, served: Served, length: int) -> int | None:
        """Tokens that the context has behind `length`, 1 at least; None: it is not known how many it holds."""
        limit = self._context(served)
        return None if limit is None else max(1, limit - length)

    def _context(self, served: Served) -> int | None:
        own = [w.max_session_tokens for w in self._roster.of_model(served)]
        return max(own, default=self._config.max_session_tokens)

    def _check_time(self, to_run: int, options: GenerationOptions, now_us: int) -> None:
        """Refuse what cannot be in time: a deadline that has passed, a first token that would come too late."""
        if options.deadline_us is not None and options.deadline_us <= now_us:
            raise DeadlineExpired(f"the deadline passed {(now_us - options.deadline_us) / 1000:g} ms ago")
        bounds = [options.ttft_target_us] if options.ttft_target_us is not None else []
        if options.deadline_us is not None:
            bounds.append(options.deadline_us - now_us)
        if not bounds:
            return
        predicted = self._outlook.forecast(self._models.served.line.tokens, to_run)
        if predicted is not None and predicted > min(bounds):
            late_ms = -(-(predicted - min(bounds)) // 1000)
            raise AtCapacity(
                "ms to the first token", -(-predicted // 1000), min(bounds) // 1000, min(late_ms, RETRY_MAX_MS)
            )
