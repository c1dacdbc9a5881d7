"""What happened in one simulated life, for whoever has to find out why it failed."""

from collections import deque

from microtome.planner.events import (
    Deliver,
    Event,
    GiveUpWorker,
    Instruction,
    RunStep,
    StepDone,
    StepFailed,
    Submit,
    Tick,
    WorkerGone,
    WorkerJoined,
)

_KEPT = 400  # lines: the end is what explains a failure


class Story:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._lines: deque[str] = deque(maxlen=_KEPT)

    def tell(self, at_us: int, line: str) -> None:
        self._lines.append(f"{at_us:>9} {line}")

    def event(self, event: Event) -> None:
        if isinstance(event, Tick):
            return  # what it leads to is told
        self.tell(event.at_us, f"-> {_event(event)}")

    def instruction(self, at_us: int, instruction: Instruction) -> None:
        self.tell(at_us, f"   <- {_instruction(instruction)}")

    def __str__(self) -> str:
        return "\n".join([f"seed {self.seed}", *self._lines])


def _event(event: Event) -> str:
    match event:
        case WorkerJoined(worker=worker, capability=own, held=held):
            return f"WorkerJoined {worker} {own.incarnation[:6]} cells={own.usable_cells} held={len(held)}"
        case WorkerGone(worker=worker, incarnation=incarnation, cause=cause):
            return f"WorkerGone {worker} {incarnation[:6]}: {cause}"
        case StepDone(worker=worker, result=result):
            return f"StepDone {worker} {result.incarnation[:6]} step {result.step} tokens={list(result.tokens)}"
        case StepFailed(worker=worker, step=step, refused=refused, message=message):
            return f"StepFailed {worker} step {step} refused={refused}: {message}"
        case Submit(generation=generation, prompt=prompt, options=options, session=session, siblings=siblings):
            kin = f" +{len(siblings)}" if siblings else ""
            return (
                f"Submit {generation}{kin} session={session} prompt={len(prompt)} max={options.max_new_tokens} "
                f"priority={options.priority} deadline={options.deadline_us} ttft={options.ttft_target_us}"
            )
        case _:
            return repr(event)


def _instruction(instruction: Instruction) -> str:
    match instruction:
        case RunStep(worker=worker, plan=plan):
            rows = zip(plan.sequences, plan.starts, plan.widths, plan.flags, strict=True)
            text = " ".join(f"{s}@{a}+{n}/{f}" for s, a, n, f in rows)
            ops = " ".join(type(op).__name__ + str(op.sequence) for op in plan.ops)
            return f"RunStep {worker} {plan.step}: {text} | {ops}"
        case Deliver(generation=generation, offset=offset, tokens=tokens, finish=finish, error=error):
            end = f" {finish.value}" if finish else ""
            return f"Deliver {generation} @{offset} {list(tokens)}{end}{f' {error!r}' if error else ''}"
        case GiveUpWorker(worker=worker, incarnation=incarnation, cause=cause):
            return f"GiveUpWorker {worker} {incarnation[:6]}: {cause}"
        case _:
            return repr(instruction)
