"""Descriptions of the rules, and remedies for the problems that they find."""

from __future__ import annotations

REMEDIES = {
    "nan": "See the module it began in; tap.blackbox(step, model, optimizer) names the operation.",
    "inf": "See the module it began in; lower the learning rate, or scale the loss in float16.",
    "exploding": "Clip gradients, lower the learning rate, check the batch.",
    "vanishing": "Look for saturated or dead layers behind it, and for underflow in 16 bits.",
    "dead": "Lower the learning rate, or use a leaky activation.",
    "saturated": "Use bfloat16, or scale the tensor.",
    "constant": "Check its input and its initialization.",
    "loss_spike": "Check the batch of that step; clip gradients or lower the learning rate.",
    "replicas": "Check for missing synchronization and faulty memory; go back to a checkpoint.",
    "outlier": "Check its data and its hardware.",
    "behind": "Check whether its process lives; check its data loading and its hardware.",
    "no_optimizer": "Create the optimizer with all parameters of the model.",
    "initialization": "Give each layer its own random numbers of about 1/sqrt(fan_in).",
    "learning_rate": "Check the schedule: its warmup, its unit (batches or epochs), its last step.",
    "input_ignored": "Look for an input that is not used, masked or multiplied by 0.",
    "not_normalized": "Subtract the mean of the training data and divide by its deviation.",
    "wide_layers": "Look for a constant, a norm or an autocast region that changes the dtype.",
}
"""Remedies by rule. Rules that are missing here name the remedy in their message."""

_NOT_CHOSEN = {
    "replicas": "a rank whose weights or optimizer state differ from those of the others",
    "outlier": "a rank that is far from the others",
    "behind": "a rank that is behind the others, or sends nothing",
    "unseen": "what cannot be observed as usual",
    "remark": "limits of what is observed",
}  # rules that nobody passes to `alerts=`


def looks_for(rule: str) -> str:
    """Return the problem that a rule looks for: its function's first sentence, without the verb.

    >>> looks_for("not_registered"), looks_for("outlier"), looks_for("mine")
    ('layers in a plain list or dict of a module, ...', 'a rank that is far from the others', '')
    """
    from tensortap import alerts

    if rule in _NOT_CHOSEN:
        return _NOT_CHOSEN[rule]
    text = getattr(alerts, rule, None).__doc__ or ""
    first = " ".join(text.partition("\n\n")[0].split()).rstrip(".").replace("`", "")
    for verb in ("Report ", "Give a hint about ", "Give a hint if "):
        first = first.removeprefix(verb)
    return first
