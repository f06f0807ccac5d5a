"""A live worker stands mutated frames of real traffic; ``make fuzz`` feeds it a million."""

from __future__ import annotations

import pytest

from live_fuzz import functions  # noqa: F401 (what the workers call)
from live_fuzz.__main__ import feed
from live_fuzz.adapt import Live
from live_fuzz.attacker import VictimFailed, VictimProcess
from live_fuzz.capture import BODY_KINDS, MESSAGE_KINDS, Corpus, capture
from live_fuzz.growth import growth
from live_fuzz.minimize import Saved, replay
from live_fuzz.mutate import Mutator, classify
from telegrad._transport.shared_memory import Proof

pytestmark = pytest.mark.filterwarnings("ignore:.*quantized tensor creation", "ignore:Sparse CSR tensor support")


@pytest.fixture(scope="module")
def proof() -> Proof:
    return Proof()


@pytest.fixture(scope="module")
def corpus(proof: Proof) -> Corpus:
    return capture(proof, rounds=2)


def test_every_message_and_kind_of_body_is_captured(corpus: Corpus) -> None:
    assert corpus.kinds() == MESSAGE_KINDS
    assert corpus.features() == BODY_KINDS
    assert corpus.without_pickle().kinds() == MESSAGE_KINDS
    assert len(corpus.frames) > 1000


def test_a_seed_names_all_inputs(corpus: Corpus) -> None:
    def inputs() -> list[bytes]:
        mutator, live = Mutator(corpus, 1), Live(2)
        return [mutator.request(live).raw for _ in range(300)]

    first = inputs()
    assert first == inputs()
    assert len(set(first)) > 200


def test_frames_that_were_captured_end_no_connection(corpus: Corpus) -> None:
    ends = {frame.kind: classify(frame.raw, frame.from_dialler) for frame in corpus.frames}
    assert {kind for kind, how in ends.items() if how} == {"Goodbye"}
    assert classify(corpus.frames[0].raw[:-1], corpus.frames[0].from_dialler) == "hang up"
    assert classify(b"x" + corpus.frames[0].raw, corpus.frames[0].from_dialler) == "refused"


@pytest.mark.parametrize(("allow_pickle", "count"), [(False, 4000), (True, 1000)])
def test_a_live_worker_stands_mutated_frames(proof: Proof, corpus: Corpus, allow_pickle: bool, count: int) -> None:
    assert feed(proof, corpus, 1, count, count // 4, allow_pickle) >= count


def test_a_victim_that_dies_is_noticed(proof: Proof) -> None:
    victim = VictimProcess(proof, allow_pickle=False)
    try:
        victim.check()
        victim.process.kill()
        with pytest.raises(VictimFailed, match="ended with code -9"):
            victim.ask("count\n")
    finally:
        victim.close()


def test_a_saved_stream_is_sent_again(proof: Proof, corpus: Corpus) -> None:
    frames = [frame.raw for frame in corpus.without_pickle().frames if frame.from_dialler][:50]
    saved = Saved(False, [b"".join(frames), b"no frame at all"])
    assert replay(proof, saved) == ""


def test_growth_is_what_the_last_quarter_has_more_than_the_first() -> None:
    def samples(contexts: list[int]) -> list[dict[str, int]]:
        return [{"inputs": number, "memory": 100 << 20, "contexts": count} for number, count in enumerate(contexts)]

    assert growth(samples([90, 1, 1, 1, 1, 1, 1, 1, 1])) == []
    assert growth(samples([0, 1, 1, 2, 3, 4, 5, 6, 6])) == ["contexts from 1 to 6"]
