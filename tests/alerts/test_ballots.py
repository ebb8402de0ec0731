"""Ballots: digests of replicas that ranks send as records."""

from tensortap.alerts.ballots import BALLOT, Ballot, BallotBox, value_of_ballot
from tensortap.alerts.vote import GroupDigests, ReplicaLayout, ReplicaMessage
from tensortap.record import Blob, Kind, Record

RANKS = (0, 1, 2)
LAYOUT = ReplicaLayout("fc.weight", Kind.WEIGHT, "fc", "float32", (2,), None, True)


def ballot(rank, step, digest=b"same", layouts=True, check="net"):
    group = GroupDigests(RANKS, "one", digest.ljust(16, b"."))
    given = {"one": (LAYOUT,)} if layouts else {}
    value = value_of_ballot(Ballot(check, ReplicaMessage(step, (group,)), given))
    return Record(BALLOT, Kind.VALUE, step, 0, 0, rank, 3, step * 10**9, value=value)


def counted(records):
    box = BallotBox()
    alerts = [alert for record in records for alert in box.add(record)]
    return [(alert.rank, alert.step) for alert in alerts], [(a.rank, a.step) for a in box.close()]


def test_a_group_is_compared_once_all_ranks_have_sent_theirs():
    sent = [
        ballot(r, s, b"odd" if (r, s) == (1, 20) else b"same") for s in (0, 10, 20) for r in RANKS
    ]
    assert counted(sent) == ([(1, 20)], [])
    by_rank = sorted(sent, key=lambda record: record.rank)
    assert counted(by_rank) == ([(1, 20)], [])  # one rank after the other
    assert counted(reversed(sent)) == ([(1, 20)], [])  # whatever arrives first
    assert counted(sent[:-1]) == ([], [(1, 20)])  # one against one
    other = [ballot(r, 20, b"odd", check="teacher") for r in RANKS]
    assert counted([*sent[:6], *other]) == ([], [])  # of another model


def test_a_rank_that_stops_sending_holds_nobody_up():
    sent = [  # a step takes a second
        ballot(rank, step, b"odd" if rank == 1 and step == 40 else b"same")
        for step in range(0, 120, 10)
        for rank in RANKS
        if rank != 2 or step < 30
    ]
    assert counted(sent) == ([(1, 40)], [])
    back = [
        ballot(rank, step, b"odd" if rank == 2 else b"same")
        for step in (120, 130)
        for rank in RANKS
    ]
    assert counted([*sent, *back]) == ([(1, 40), (2, 120)], [])


def test_layouts_that_come_later_and_records_of_anyone():
    late = [ballot(r, s, b"odd" if r == 1 else b"same", layouts=s > 10) for s in (0, 10, 20)
            for r in RANKS]  # fmt: skip
    assert counted(late) == ([(1, 20)], [])
    box = BallotBox()
    for value in (None, 1.5, Blob("bytes", b"\x93"), Blob("bytes", b"")):
        assert box.add(Record(BALLOT, Kind.VALUE, 0, 0, 0, 0, 3, 0, value=value)) == []
    message = ReplicaMessage(0, (GroupDigests(RANKS, "one", b"short"),))
    value = value_of_ballot(Ballot("net", message, {"one": (LAYOUT,)}))
    for rank in (*RANKS, 7):
        assert box.add(Record(BALLOT, Kind.VALUE, 0, 0, 0, rank, 3, 0, value=value)) == []
