"""Workers that take turns: who holds a seat, who is asked for it, and what a report can change."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from controller.fleet.liveness import Liveness
from controller.ledger import Ledger
from controller.ledger import decisions as cmd
from controller.ledger import events as ev
from controller.ledger.decisions.seats import next_turn
from controller.ledger.enums import Role
from controller.services.worker import check_seat
from paceline.config.sections.workers import FleetConfig
from paceline.payloads.group_limits import Invalid
from paceline.v1 import common_pb2, worker_pb2
from tests.fixtures.ledgers import Driven

SYNCHRONOUS = {"max_staleness": 0, "late_groups": "drop"}


def seated(*pairs: int, **changes: Any) -> Driven:
    """Pairs of a replica and a rollout worker, each with a seat of its own; generation's turn."""
    run = Driven(**(SYNCHRONOUS | changes))
    for n in pairs or (0,):
        come(run, f"p{n}")
    for n in pairs or (0,):
        come(run, f"r{n}")
    for n in pairs or (0,):
        park(run, f"p{n}")
    return run


def come(run: Driven, worker: str, host: str = "h") -> None:
    newest = run.state.versions.version
    run.register(worker, seat=f"{host}/{worker[1:]}", host=host)
    run.observe(worker)
    if worker.startswith("p"):
        run.observe(worker, state=newest)
    else:
        run.observe(worker, loaded=newest)


def say(run: Driven, worker: str, grant: int, *, parked: bool = True, seen: int = 0) -> None:
    """``seen``: term of its newest directive; 0: the present one."""
    run.do(cmd.report_seat(worker, run.current[worker], grant, parked, seen or run.state.term))


def park(run: Driven, worker: str) -> None:
    told = run.directive(worker).seat
    assert told.grant and not told.hold, f"{worker} is not asked: {told}"
    say(run, worker, told.grant)


def holder(run: Driven, seat: str = "h/0") -> str:
    found = run.state.fleet.seats.by_name[seat].holder
    return found[0] if found else ""


def turn(run: Driven) -> None:
    """The leader's next look."""
    run.do(cmd.settle_turn())


def test_a_synchronous_run_takes_turns_step_by_step() -> None:
    run = seated(steps=2)
    for step in 1, 2:
        assert holder(run) == "r0" and run.state.steps.open is None
        assert run.directive("r0").seat.hold and not run.directive("p0").seat.grant
        run.observe("r0", loaded=step - 1)
        run.fill("r0", 3)
        turn(run)
        assert run.state.fleet.seats.turn is Role.ROLLOUT, "a step misses a group"
        run.fill("r0", 1)
        turn(run)
        assert run.event(ev.TurnChanged).role is Role.POLICY
        assert run.lease("r0").empty_reason == "parked" and run.state.steps.open is None
        park(run, "r0")
        assert run.names() == ["SeatReturned", "SeatGranted", "StepOpened"]
        run.vote("p0")
        if step == 1:
            assert run.event(ev.TurnChanged).role is Role.ROLLOUT
            park(run, "p0")
    assert holder(run) == "p0", "nothing is left to generate, and the last checkpoint is due"
    run.failover()
    run.checkpoint()
    assert run.state.ended


def test_generation_runs_ahead_up_to_the_bound_and_leaves_what_is_not_worth_a_wait() -> None:
    run = seated(max_staleness=1)
    leases = list(run.lease("r0", 8).leases)
    for lease in leases[:5]:
        run.submit("r0", lease)
    turn(run)
    assert run.state.fleet.seats.turn is Role.ROLLOUT, "3 of 4 groups of a step are in flight"
    run.submit("r0", leases[5])
    turn(run)
    run.return_task("r0", leases[6], "hand_back")
    park(run, "r0")
    assert run.submit("r0", leases[7]).code == "accepted", "it was being scored"
    run.vote("p0")
    assert run.state.fleet.seats.turn is Role.ROLLOUT and len(run.state.tasks.ready) == 3


def test_all_seats_change_together_and_a_step_waits_for_the_last() -> None:
    run = seated(0, 1)
    run.fill("r0", 4)
    turn(run)
    assert {s.asked for s in run.state.fleet.seats.by_name.values()} == {True}
    park(run, "r0")
    assert holder(run, "h/0") == "p0" and run.state.steps.open is None
    park(run, "r1")
    assert run.state.steps.open is not None


def test_a_report_that_is_stale_repeated_or_a_lie_changes_nothing() -> None:
    run = seated()
    grant = run.directive("r0").seat.grant
    for worker, said, parked in (
        ("r0", grant, True),  # nobody has asked for it
        ("r0", grant - 1, True),  # of the grant before
        ("p0", grant - 1, True),  # repeated
        ("p0", grant, True),  # of another's grant
        ("p0", grant + 1, False),  # of one that never was
    ):
        say(run, worker, said, parked=parked)
        assert run.names() == [] and holder(run) == "r0"
    run.fill("r0", 4)
    turn(run)
    for worker, said, parked in ("p0", grant, True), ("r0", grant, False), ("r0", grant - 1, True):
        say(run, worker, said, parked=parked)
        assert run.names() == [] and holder(run) == "r0"
    with pytest.raises(cmd.CommandRefused):
        run.do(cmd.report_seat("r0", run.current["r0"] - 50, grant, True, run.state.term))


def test_what_was_asked_for_stays_so_if_the_turn_comes_back() -> None:
    """It has parked, or will have, and never uses its devices under that grant again."""
    run = seated()
    run.fill("r0", 4)
    turn(run)
    before = run.directive("r0").seat.grant
    run.die("p0")  # the mesh is broken: a joiner needs the turn of training
    come(run, "p0")
    run.do(cmd.pause("a", True))
    assert run.directive("r0").seat.grant == before and not run.directive("r0").seat.hold
    park(run, "r0")
    assert holder(run) == "p0" and run.directive("p0").seat.grant > before


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("how", ["dies", "is replaced", "stops"])
def test_a_holder_that_goes_frees_its_seat_in_the_same_event(how: str, asked: bool) -> None:
    run = seated()
    if asked:
        run.fill("r0", 4)
        turn(run)
    if how == "dies":
        run.die("r0")
    elif how == "stops":
        run.observe("r0", "stopped")
    else:
        run.register("r0", seat="h/0")
    assert holder(run) == ("p0" if asked else "r0" if how == "is replaced" else "")
    if asked:
        assert run.state.steps.open is not None
    run.failover()
    assert run.ledger.check() == []


def test_a_joiner_and_a_broken_mesh_wait_for_the_turn_of_training() -> None:
    run = seated(0, 1)
    epoch = run.state.fleet.mesh_epoch
    run.die("p1")
    come(run, "p1")
    assert run.state.fleet.mesh.broken and run.state.fleet.mesh_epoch == epoch
    assert not run.directive("p1").seat.grant and not run.directive("p0").HasField("mesh")
    run.fill("r0", 4)
    turn(run)
    park(run, "r1")
    run.do(cmd.form_mesh())
    assert run.state.fleet.mesh_epoch == epoch, "p0 does not hold its seat"
    park(run, "r0")
    run.do(cmd.form_mesh())
    assert run.state.fleet.whole_mesh.names == ["p0", "p1"] and run.state.steps.open is not None


def test_a_replica_that_comes_before_it_has_its_seat_joins_after_the_step() -> None:
    run = seated(0, 1)
    run.die("p1")
    run.fill("r0", 4)
    turn(run)
    come(run, "p1")
    park(run, "r0")
    run.do(cmd.form_mesh())
    assert run.state.fleet.whole_mesh.names == ["p0"], "the others do not wait for r1 to park"
    park(run, "r1")
    run.vote("p0")
    assert run.state.fleet.whole_mesh.names == ["p0", "p1"]
    assert run.state.fleet.seats.turn is Role.POLICY, "it receives the state first"
    run.observe("p1", state=1)
    assert run.state.fleet.seats.turn is Role.ROLLOUT


def test_a_run_whose_last_replica_dies_parked_is_restored_once_nothing_is_in_flight() -> None:
    run = seated(max_staleness=1)
    (lease,) = run.lease("r0").leases
    run.die("p0")
    run.register("p0", seat="h/0")
    run.observe("p0")
    assert next_turn(run.state) is None, "what is in flight can still be trained"
    run.submit("r0", lease)
    turn(run)
    assert run.event(ev.TurnChanged).why == "no replica holds version 0"
    park(run, "r0")
    assert run.state.fleet.whole_mesh.restore
    run.observe("p0", state=run.state.versions.version)
    assert run.state.fleet.seats.turn is Role.ROLLOUT


def test_evaluations_are_finished_before_training_goes_on_and_before_the_run_ends() -> None:
    run = seated(steps=1, eval_rows=1, eval_every=1)
    (held_out,) = run.lease("r0", 1).leases
    run.fill("r0", 4)
    turn(run)
    assert run.state.fleet.seats.turn is Role.ROLLOUT
    run.submit("r0", held_out)
    turn(run)
    park(run, "r0")
    run.vote("p0")
    turn(run)
    assert run.state.fleet.seats.why == "evaluations are left"
    park(run, "p0")
    run.checkpoint()
    run.observe("r0", loaded=1)
    run.submit("r0", run.lease("r0").leases[0], 1)
    assert run.state.ended


def test_a_pause_keeps_the_turn_and_a_stop_gives_it_to_training() -> None:
    run = seated()
    run.fill("r0", 4)
    run.do(cmd.pause("a", True))
    assert next_turn(run.state) is None
    run.do(cmd.stop("b", "enough"))
    assert run.state.fleet.seats.turn is Role.POLICY


def test_a_grant_that_redis_has_lost_is_asked_back_once() -> None:
    """The holder by the ledger had parked, and would never use the seat under that grant again."""
    run = seated()
    grant = run.directive("r0").seat.grant
    for worker, said in ("r0", grant), ("p0", grant + 1):
        say(run, worker, said)
        assert run.names() == [], "no grant of this term is lost"
    run.lead(grant + 100)
    say(run, "p0", grant + 1, parked=False)
    assert run.names() == ["SeatAsked"]
    say(run, "r0", grant)
    assert run.names() == ["SeatReturned"] and not holder(run), "p0 uses the devices"
    run.failover()
    say(run, "p0", grant + 1)
    assert run.names() == ["SeatReturned", "SeatGranted"]
    assert run.directive("r0").seat.grant >= grant + 100, "above all that may be lost"
    say(run, "p0", grant + 2, parked=False)
    assert run.names() == [] and holder(run) == "r0"


def test_a_holder_that_is_ahead_of_the_journal_returns_its_seat() -> None:
    run = seated()
    grant = run.directive("r0").seat.grant
    for said in grant + 1, grant + 100:
        say(run, "r0", said)
        assert run.names() == [], "no such grant can be lost in this term"
    run.lead(grant + 100)
    say(run, "r0", grant + 1)
    assert run.names() == ["SeatAsked"]
    say(run, "r0", grant + 1)
    assert run.names() == ["SeatReturned"] and not holder(run), "p0 may have a lost grant"
    say(run, "p0", grant - 1, seen=grant)
    assert run.names() == [], "it may still follow a directive of the term before"
    say(run, "p0", grant - 1)
    assert run.names() == ["SeatReturned", "SeatGranted"] and holder(run) == "r0"


def test_a_stray_that_dies_is_waited_for_no_more() -> None:
    run = seated(0, 1)
    grant = run.directive("r0").seat.grant
    run.lead(grant + 100)
    say(run, "r0", grant)
    say(run, "p0", grant + 1, parked=False)
    say(run, "r0", grant)
    assert not holder(run)
    run.die("p0")
    assert holder(run) == "r0"


def test_a_worker_whose_registration_is_lost_keeps_the_others_from_its_devices() -> None:
    run = seated()
    lost = next(n for n, e in enumerate(run.journal) if e.get("worker_id") == "r0")
    run.ledger = Ledger(checked=True)
    for event in run.journal[:lost]:
        run.ledger.apply(ev.from_json(event))
    liveness = Liveness(FleetConfig(lease_ttl_s=5.0))
    run.do(cmd.begin_term(100, "controller-1"))
    liveness.begin(run.ledger, 0.0)
    for _ in range(2):
        say(run, "p0", 1)
    assert run.names() == ["SeatReturned"] and not holder(run), "r0 is unknown, and may use it"
    run.do(cmd.pause("a", True))  # the turn stays
    come(run, "r0")
    for worker in "p0", "r0":
        liveness.heard(worker, run.current[worker], 3.0)
    assert not any(liveness.tick(run.ledger, tenth / 10) for tenth in range(49))
    (certain,) = liveness.tick(run.ledger, 5.0)
    run.do(certain)
    assert run.names() == ["SeatsCertain"] and not holder(run), "it has not parked yet"
    say(run, "r0", 2)
    assert run.names() == ["SeatReturned", "SeatGranted"] and holder(run) == "p0"


def test_a_worker_that_has_parked_may_be_still_and_a_holder_may_not() -> None:
    run = seated()
    liveness = Liveness(FleetConfig(wedged_after_s=60.0, lease_ttl_s=1e6))
    liveness.begin(run.ledger, 0.0)
    for name in "p0", "r0":
        caller = common_pb2.Caller(worker_id=name, incarnation=run.current[name])
        liveness.observe(worker_pb2.Report(caller=caller, busy=True), 0.0)
    dead = [str(c) for t in range(61) for c in liveness.tick(run.ledger, float(t))]
    assert len(dead) == 1 and "r0" in dead[0]


@pytest.mark.parametrize(
    ("partner", "named"),
    [
        ("healthy", "r0 is on h, and p0 on other"),
        ("silent", ""),
        ("gone", ""),
        ("here", ""),
        ("scored", "p0 is on h, and s0 on other"),
        ("seat of a pair", "PAIR:SCORER"),
        ("lends", "alone"),
    ],
)
def test_the_workers_of_a_device_are_on_one_host(partner: str, named: str) -> None:
    """A pair that moves after its host was lost need not wait until it is declared dead."""
    run, now = seated(), 100.0
    liveness = Liveness(FleetConfig(lease_ttl_s=10.0))
    liveness.begin(run.ledger, now - (6.0 if partner == "silent" else 0.0))
    if partner == "gone":
        run.die("r0")
    scores = partner in ("scored", "seat of a pair", "lends")
    sharing: Any = "lend" if partner == "lends" else "turns"
    config = SimpleNamespace(fleet=FleetConfig(lease_ttl_s=10.0, sharing=sharing))
    leader: Any = SimpleNamespace(
        context=SimpleNamespace(config=config),
        ledger=run.ledger,
        liveness=liveness,
        clock=SimpleNamespace(monotonic=lambda: now),
    )
    request = worker_pb2.RegisterRequest(
        caller=common_pb2.Caller(worker_id="s0" if scores else "p0", incarnation=9),
        role=common_pb2.ROLE_SCORER if scores else common_pb2.ROLE_POLICY,
        host="h" if partner == "here" else "other",
        seat="h/0:s0" if partner in ("scored", "lends") else "h/0",
    )
    with pytest.raises(Invalid, match=named) if named else nullcontext():
        check_seat(leader, request)


def test_a_snapshot_from_before_there_were_seats_is_read() -> None:
    run = Driven.fleet("p0", "r0")
    data = run.ledger.to_snapshot()
    del data["fleet"]["seats"]
    for worker in data["fleet"]["workers"].values():
        del worker["seat"]
    ledger = Ledger.from_snapshot(data)
    assert ledger.fingerprint() == run.ledger.fingerprint()


# ---- scorers at the devices of a pair ---------------------------------------------------------


def scored(staleness: int = 0) -> Driven:
    """Two pairs, and a scorer at the devices of the first; generation's turn."""
    run = seated(0, 1, max_staleness=staleness)
    score(run)
    return run


def score(run: Driven) -> None:
    """The scorer comes, or comes again."""
    run.register("s0", scorer="rm", address="h:1", seat="h/0:s0")
    run.observe("s0")


def test_a_scorer_holds_devices_with_generation_and_never_beside_a_replica() -> None:
    run = scored()
    assert (holder(run), holder(run, "h/0:s0")) == ("r0", "s0")
    run.fill("r0", 4)
    turn(run)
    park(run, "r0")
    park(run, "r1")
    assert not holder(run) and run.state.steps.open is None, "its scorer has not parked"
    park(run, "s0")
    assert holder(run) == "p0" and run.state.steps.open is not None
    assert not run.directive("s0").seat.grant
    run.vote("p0")
    run.vote("p1")
    park(run, "p1")
    assert not holder(run, "h/0:s0"), "the replica at its own devices has not parked"
    park(run, "p0")
    assert (holder(run), holder(run, "h/0:s0")) == ("r0", "s0")


def test_a_group_that_waits_for_its_scores_in_trainings_turn_is_trained_later() -> None:
    run = scored(staleness=1)
    leases = list(run.lease("r0", 8).leases)
    for lease in leases[:7]:
        run.submit("r0", lease)
    turn(run)
    for worker in "r0", "r1", "s0":
        park(run, worker)
    assert not run.lease("r0").leases
    run.vote("p0")
    run.vote("p1")
    for worker in "p0", "p1":
        park(run, worker)
    assert holder(run, "h/0:s0") == "s0"
    assert run.submit("r0", leases[7]).code == "accepted"


@pytest.mark.parametrize("when", ["in generation", "asked", "parked"])
@pytest.mark.parametrize("who", ["s0", "r0", "p0"])
def test_who_dies_around_a_scorers_turn_leaves_the_devices_to_the_others(
    who: str, when: str
) -> None:
    run = scored()
    if when != "in generation":
        run.fill("r0", 4)
        turn(run)
    if when == "parked":
        park(run, "s0")
    run.failover()
    run.die(who)
    if who == "s0":
        score(run)
    else:
        come(run, who)
    for worker in "r0", "r1", "s0":
        if run.directive(worker).seat.grant and not run.directive(worker).seat.hold:
            park(run, worker)
    seats = run.state.fleet.seats
    for name, _ in [who for seat in seats.by_name.values() for who in seat.strays]:
        say(run, name, 0)  # The new leader has not heard yet that it uses nothing
    if seats.turn is Role.ROLLOUT:
        assert (holder(run), holder(run, "h/0:s0")) == ("r0", "s0")
    else:
        assert (holder(run), holder(run, "h/0:s0")) == ("p0", "")


def test_a_scorer_under_a_grant_that_redis_has_lost_keeps_the_replica_away() -> None:
    run = scored()
    grant = run.directive("s0").seat.grant
    run.fill("r0", 4)
    turn(run)
    park(run, "s0")
    run.lead(grant + 100)
    say(run, "s0", grant + 50, parked=False)
    park(run, "r0")
    assert not holder(run)
    say(run, "s0", grant + 50)
    assert holder(run) == "p0"


# ---- lending ----------------------------------------------------------------------------------


def lent(pairs: int = 3, training: int = 1, **changes: Any) -> Driven:
    """Pairs of which ``training`` train, those with the lowest numbers, and the others generate."""
    run = Driven(bounds={"training_seats": training}, **changes)
    for n in range(pairs):
        run.register(f"p{n}", seat=f"h/{n}")
        run.observe(f"p{n}")
    for n in range(training):
        run.observe(f"p{n}", state=0)
    for n in range(pairs):
        come(run, f"r{n}")
    return run


def sides(run: Driven) -> str:
    """The side of each seat: t or g."""
    seats = sorted(run.state.fleet.seats.by_name.items())
    return "".join("t" if seat.role is Role.POLICY else "g" for _, seat in seats)


def test_lent_seats_are_split_and_both_sides_work_at_once() -> None:
    run = lent()
    assert sides(run) == "tgg" and [holder(run, f"h/{n}") for n in range(3)] == ["p0", "r1", "r2"]
    assert run.state.fleet.whole_mesh.names == ["p0"]
    assert run.lease("r0").empty_reason == "parked"
    run.fill("r1", 4)
    assert run.state.steps.open is not None and run.lease("r2").leases


def test_a_seat_that_is_lent_to_training_brings_its_replica_into_the_mesh_and_back() -> None:
    run = lent()
    reply = run.do(cmd.scale("a", {"training": 2}, {"training": 1}))
    assert reply == "2 of 3 pairs train" and sides(run) == "ttg"
    park(run, "r1")
    assert run.state.fleet.whole_mesh.names == ["p0", "p1"]
    run.observe("p1", state=0)
    run.fill("r2", 4)
    run.do(cmd.scale("b", {"training": 1}))
    assert run.state.steps.open is not None and sides(run) == "ttg", "its step goes on"
    run.vote("p0")
    assert run.directive("p1").seat.hold, "the step waits for its vote"
    run.vote("p1")
    assert sides(run) == "tgg" and not run.directive("p1").seat.hold
    assert run.state.fleet.whole_mesh.names == ["p0"], "the others do not wait until it has parked"
    park(run, "p1")
    assert holder(run, "h/1") == "r1"
    run.failover()
    assert sides(run) == "tgg"


def test_the_only_replica_with_the_state_gets_its_seat_back() -> None:
    run = lent()
    run.do(cmd.scale("a", {"training": 2}))
    park(run, "r1")
    run.observe("p1", state=0)
    run.do(cmd.scale("b", {"training": 1}))
    park(run, "p1")
    run.register("p0", seat="h/0")  # its next process, without a state
    assert sides(run) == "gtg"
    park(run, "r1")
    run.do(cmd.form_mesh())
    assert run.state.fleet.whole_mesh.names == ["p1"] and not run.state.fleet.whole_mesh.restore


def test_the_only_replica_with_the_state_keeps_its_seat_until_another_has_it() -> None:
    run = lent(training=2)
    lose(run, "p1", "r1")  # the other one cannot be lent: nobody would generate there
    run.register("p1", seat="h/1")
    run.observe("p1")
    run.do(cmd.scale("a", {"training": 1}))
    assert sides(run) == "ttg"
    run.observe("p1", state=0)
    assert sides(run) == "gtg"


def test_a_member_of_an_open_step_keeps_its_seat_until_the_commit() -> None:
    """A journal of before may have asked for it; without its vote the step would never end."""
    run = lent()
    run.fill("r1", 4)
    run.state.fleet.seats.by_name["h/0"].ask(run.now, "it is lent")
    assert run.directive("p0").seat.hold
    run.state.fleet.seats.by_name["h/0"].free(run.now, "p0 has parked")
    assert "p0 of open step 1 does not hold its seat" in run.ledger.check()


def lose(run: Driven, *workers: str) -> None:
    for worker in workers:
        run.die(worker)
        if run.state.fleet.mesh.broken:
            run.do(cmd.form_mesh())


def obey(run: Driven) -> None:
    """Everybody does as told: parks, receives the state, loads the weights."""
    for _ in range(4):
        newest = run.state.versions.version
        for name, worker in list(run.state.fleet.workers.items()):
            told = run.directive(name) if worker.alive else None
            if told is None or told.lifecycle == worker_pb2.LIFECYCLE_STOPPED:
                if told is not None:
                    run.observe(name, "stopped")
            elif told.seat.grant and not told.seat.hold:
                say(run, name, told.seat.grant)
            elif told.HasField("mesh"):
                run.observe(name, state=newest)
        if run.state.fleet.mesh.broken:
            run.do(cmd.form_mesh())


@pytest.mark.parametrize(
    ("training", "lost", "split"),
    [
        (1, ["p0"], "gtg"),  # another trains in its place, and its own devices generate
        (2, ["p0"], "gtt"),
        (1, ["r1"], "tgg"),  # one of two that generate: it will be back
        (1, ["r1", "r2"], "gtt"),  # nobody generates: they train, and r0 generates
        (1, ["p0", "r0"], "tg"),  # its host is gone
        (2, ["p2", "r2"], "tg"),  # more are asked for than there are
        (1, ["p0", "p1", "p2"], "ggt"),  # nobody can take its place
    ],
)
def test_what_is_left_of_the_fleet_goes_on(training: int, lost: list[str], split: str) -> None:
    run = lent(training=training)
    obey(run)
    lose(run, *lost)
    obey(run)
    assert sides(run) == split
    if lost != ["p0", "p1", "p2"]:
        holders = (holder(run, seat) for seat in run.state.fleet.seats.by_name)
        run.fill(next(name for name in holders if name.startswith("r")), 4)
        assert run.state.steps.open is not None
    run.failover()


def test_a_last_pair_takes_turns_until_another_comes() -> None:
    run = lent(2, **SYNCHRONOUS)
    lose(run, "p0", "r0")
    park(run, "r1")
    run.do(cmd.form_mesh())
    run.observe("p1", state=run.state.versions.version)
    park(run, "p1")
    run.fill("r1", 4)
    turn(run)
    park(run, "r1")
    assert run.state.steps.open is not None
    for worker in "p0", "r0":
        come(run, worker)
    obey(run)
    assert run.state.steps.open is not None and sides(run) == "gt"
    run.vote("p1")
    assert (holder(run), holder(run, "h/1")) == ("r0", "p1")


def test_the_only_replica_that_trains_can_be_drained() -> None:
    run = lent(2)
    run.do(cmd.drain("a", "p0"))
    obey(run)
    assert not run.state.fleet.workers["p0"].alive, "another has taken its state"
    assert sides(run) == "gt" and holder(run) == "r0"


def test_an_evaluation_does_not_wait_for_a_worker_that_is_parked() -> None:
    run = lent(eval_rows=2, eval_every=1)
    held_out = list(run.lease("r1", 2).leases)
    run.submit("r1", held_out[0])
    run.fill("r2", 4)
    run.do(cmd.scale("a", {"training": 2}))
    run.return_task("r1", held_out[1], "hand_back")
    park(run, "r1")
    run.vote("p0")
    assert run.state.versions.version == 1 and run.state.fleet.workers["r1"].loaded_version == 0
    run.observe("r2", loaded=1)
    assert [x.task_id for x in run.lease("r2").leases] == [held_out[1].task_id]


def test_lent_seats_take_turns_after_a_restart_that_says_so() -> None:
    run = lent()
    run.do(cmd.scale("a", {"training": 2}))
    again = run.state.run
    run.do(cmd.start_run(replace(again, bounds={"training_seats": 1, "policy_max": 9})))
    assert run.state.fleet.seats.training == 2, "the restart has changed another limit"
    run.do(cmd.start_run(replace(again, bounds={})))
    obey(run)
    assert not {s.role for s in run.state.fleet.seats.by_name.values()} - {None}
    held = {holder(run, f"h/{n}")[0] for n in range(3)}
    assert len(held) == 1, "all seats change together"
    run.failover()


@pytest.mark.parametrize(
    ("desired", "expected", "why"),
    [
        ({"training": 0}, {}, "each side needs one"),
        ({"training": 3}, {}, "each side needs one"),
        ({"training": 2, "policy": 2}, {}, "by itself"),
        ({"training": 2}, {"training": 2}, "conflict"),
    ],
)
def test_a_side_keeps_a_pair_and_nobody_undoes_anothers_loan(
    desired: dict[str, int], expected: dict[str, int], why: str
) -> None:
    run = lent()
    with pytest.raises(cmd.CommandRefused, match=why):
        run.do(cmd.scale("a", desired, expected))
    with pytest.raises(cmd.CommandRefused, match="no devices are lent"):
        seated().do(cmd.scale("a", {"training": 1}))


def test_a_host_that_is_blocked_in_generations_turn_holds_up_no_step() -> None:
    """Its replica leaves the mesh with its seat, and not without."""
    run = Driven(**SYNCHRONOUS)
    for worker in ("p0", "p1", "r0", "r1"):
        come(run, worker, f"h{worker[1:]}")
    for worker in ("p0", "p1"):
        park(run, worker)
    run.do(cmd.block_host("q", "h1"))
    assert run.lease("r1").empty_reason == "blocked"
    run.fill("r0", 4)
    turn(run)
    for worker in ("r0", "r1"):
        park(run, worker)
    assert run.state.fleet.mesh is not None and run.state.fleet.mesh.names == ["p0"]
    run.vote("p0")
    assert run.state.versions.step == 1
