"""The rules between options: what is refused, or advised against, before anything starts.

What one field may hold is said where it is declared (sections.py, algorithm.py, actor.py). A rule is here if it needs
several fields, files or the hardware. It is an `if` and a `yield`: when it applies, then the field, what is allowed,
how to fix it, and the fields `beside` it. What was got is read from the configuration. To find a rule, search for its
field:

    data       files of problems, templates, evaluation sets
    rollout    lengths, batches, sampling, answers in segments
    algorithm  the loss, DARO, a critic, a teacher
    layout     ranks and engines on the GPUs, the model on the ranks
    layers     what models with latent or linear attention, sinks, or norms after attention cannot have
    lora       adapters: of which matrices, and which of them servers can get
    engine     servers, how weights reach them, sharing GPUs with ranks, quantized servers
    trainer    the run's steps, rewards, environment, reporting
    unread     options that nothing reads as the others are set: refused, or warnings
    advice     what works and is probably not meant: warnings

checks.py runs all of them, with the rules of files (model_files.py), of fp8 (precision.py) and of upstream's options
(megatron_options.py).
"""
