"""Three brokers are stopped and started in turn while clients that know all three work."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.compat.conftest import Play
from tests.compat.player import Player
from tests.conftest import Brokers

PRODUCERS = 4


@pytest.mark.slow
def test_a_rolling_restart_loses_nothing(player: Player, brokers: Brokers, tmp_path: Path) -> None:
    trio = [brokers() for _ in range(3)]
    play = Play(player, [broker.url for broker in trio], "rolling")
    stop = tmp_path / "stop"
    with ThreadPoolExecutor(1) as threads:
        playing = threads.submit(play, "rolling.work", seconds=90, stop=str(stop), producers=PRODUCERS)
        try:
            for broker in trio:
                assert broker.stop() == 0
                broker.restart()
        finally:
            stop.touch()
        result = playing.result()
    accepted, errors = result["accepted"], result["errors"]
    print(len(accepted), errors)
    assert len(accepted) > 100
    assert len(set(accepted)) == len(accepted) == result["total"]
    assert set(result["consumed"]) == set(accepted)
    # Whatever a client could not hide was over with the next attempt.
    assert len(errors) <= 3 * (PRODUCERS + 1), errors
    for number in range(PRODUCERS):
        mine = [key for key in dict.fromkeys(result["consumed"]) if key.startswith(f"{number}-")]
        assert mine == [f"{number}-{k}" for k in range(len(mine))]
