"""What arrives is the value at the moment of the call, whatever the next line does."""

from __future__ import annotations

from tensortap.api.lookup import get as fetch


def test_changes_after_the_call_do_not_reach_the_snapshot(server, run):
    program = run(
        """
        import numpy as np, torch, tensortap as tap
        large, small = torch.zeros(200_000), torch.zeros(5)
        array, one = np.zeros(50_000, np.int16), torch.tensor(0.0)
        for i in range(60):
            for x in (large, small, array, one):
                x[...] = i
            tap.catch(large, "large")
            large += 0.5
            tap.catch(small, "small")
            small *= 0
            tap.catch([array, {"x": large}], "nested")
            array[:] = -1
            large.fill_(-1)
            tap.catch(one, "one")
            one.neg_()
            tap.catch(large[::2], "strided")
            large.zero_()
        assert tap.flush(60)
        assert tap.receipt().dropped == 0
        """,
        TENSORTAP_OVERFLOW="block",
    )
    program.end()
    held = {name: server.history.records(name) for name in server.history.names()}
    assert [len(records) for records in held.values()] == [60] * 5
    for i in range(60):
        where = {"step": i}
        assert fetch(server.history, "large", **where).eq(i).all()
        assert fetch(server.history, "small", **where).tolist() == [i] * 5
        array, inside = fetch(server.history, "nested", **where)
        assert (array == i).all()
        assert inside["x"].eq(i + 0.5).all()
        assert fetch(server.history, "one", **where).item() == i
        assert fetch(server.history, "strided", **where).eq(-1).all()


TRAIN = """
    import hashlib, json, sys
    import torch, torch.nn as nn, torch.nn.functional as F
    import tensortap as tap
    # with more, the first training of a process now and then differs on a busy machine, also
    # when tensortap is not even imported
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    catching = {catching}

    def train(autocast):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(), nn.Dropout(0.2),
            nn.Linear(8 * 14 * 14, 64), nn.LayerNorm(64), nn.ReLU(inplace=True), nn.Linear(64, 10),
        )
        if catching:
            def forward(name):
                return lambda module, args, out: tap.catch(out, name) and None
            def backward(name):
                return lambda module, grad_in, grad_out: tap.catch(grad_out, name) and None
            for name, module in model.named_children():
                module.register_forward_hook(forward(f"layer{{name}}"))
                if not getattr(module, "inplace", False) and name != "6":
                    module.register_full_backward_hook(backward(f"grad{{name}}"))
        else:
            # hooks of autograd make views of their own: the same ones, so that only catch differs
            for name, module in model.named_children():
                module.register_forward_hook(lambda module, args, out: None)
                if not getattr(module, "inplace", False) and name != "6":
                    module.register_full_backward_hook(lambda module, grad_in, grad_out: None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(20):
            x, y = torch.randn(8, 3, 16, 16), torch.randint(10, (8,))
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(model(x), y)
            if catching:
                tap.catch(loss)
            optimizer.zero_grad()
            loss.backward()
            if catching:
                for name, parameter in model.named_parameters():
                    tap.catch(parameter.grad, name + ".grad")
            optimizer.step()
            if catching:
                for name, value in model.state_dict().items():
                    tap.catch(value, name, changed=True)
                tap.step()
            losses.append(loss.detach().view(torch.int32).item())
        digest = hashlib.sha256()
        for value in model.state_dict().values():
            digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        digest.update(torch.get_rng_state().numpy().tobytes())
        tap.flush(60)
        return losses, digest.hexdigest(), tap.receipt().captured, tap.receipt().reasons["error"]

    print(json.dumps([train(autocast=False), train(autocast=True)]))
"""


def test_training_is_bit_identical(server, run):
    plain = run(TRAIN.format(catching=False)).result()
    caught = run(TRAIN.format(catching=True)).result()
    nobody = run(TRAIN.format(catching=True), to="127.0.0.1:1").result()
    assert plain[0][:2] != plain[1][:2]  # autocast is another training
    before = 0
    for (losses, weights, *_), ours, unheard in zip(plain, caught, nobody, strict=True):
        assert len(set(losses)) == 20
        got, same, captured, errors = ours
        assert (got, same, errors) == (losses, weights, 0)
        assert captured - before > 20 * 20
        before = captured
        got, same, _, errors = unheard
        assert (got, same, errors) == (losses, weights, 0)
    assert captured == server.history.written
    assert len(server.history.records("layer0")) == 40
    assert fetch(server.history, "layer0").shape == (8, 8, 14, 14)
    assert len(server.history.records("grad0")) == 40
