"""Local variables that are traced in one program, looked at in another."""

from tensortap import values as arrays
from tensortap.core.record import Kind, Opaque
from tests.processes import wait_for


def test_the_live_session_has_locals_of_the_program_and_of_its_workers(run, server, tmp_path):
    # in a file, because code of `python -c` has no source
    (tmp_path / "data.py").write_text(
        "import torch\n"
        "class Box:\n"
        "    def __repr__(self):\n"
        "        return 'a box'\n"
        "class Numbers(torch.utils.data.Dataset):\n"
        "    def __len__(self):\n"
        "        return 4\n"
        "    def __getitem__(self, index):\n"
        "        item = torch.full((2,), float(index))\n"
        "        return item\n"
        "def step(x):\n"
        "    box = Box()\n"
        "    y = x * 2\n"
        "    return y\n"
    )
    program = run(
        """
        import sys; sys.path.insert(0, FOLDER)
        import torch, tensortap as tap
        from data import Numbers, step

        tap.catch(0, "hello").wait(60)
        with tap.trace(step, ["y", "box"]) as tracer:
            for n in range(3):
                step(torch.full((2, 2), float(n)))
        assert len(tracer.results["y"].values) == 3
        data = Numbers()
        with tap.trace(data, ["__getitem__.item"]):
            options = dict(num_workers=2, multiprocessing_context="fork")
            loader = torch.utils.data.DataLoader(data, **options)
            assert len(list(loader)) == 4
        tap.flush(60)
        """.replace("FOLDER", repr(str(tmp_path)))
    )
    program.end()
    history = server.history
    records = history.records("step.y")
    assert {record.kind for record in records} == {Kind.LOCAL}
    assert [record.step for record in records] == [0, 1, 2]
    assert [arrays.rebuild(record.value)[0, 0].item() for record in records] == [0, 2, 4]
    boxes = [record.value for record in history.records("step.box")]
    assert boxes[0] == Opaque("data.Box", "a box")
    wait_for(lambda: len(history.records("__getitem__.item")) == 4)
    items = [arrays.rebuild(r.value)[0].item() for r in history.records("__getitem__.item")]
    assert sorted(items) == [0, 1, 2, 3]
