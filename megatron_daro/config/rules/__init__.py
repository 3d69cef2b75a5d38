"""The rules between options: what is refused, or advised against, before anything starts.

The range of a single field is given where it is declared (sections.py, algorithm.py, actor.py). A rule is here if it
needs several fields, files or the hardware. It is an `if` and a `yield`: the condition, then the field, what is
allowed, how to fix it, and the other fields that matter (`beside`). The values in the message are read from the
configuration. To find a rule, search for its field:

    data       files of problems, templates, evaluation sets
    rollout    lengths, batches, sampling, answers in segments
    algorithm  the loss, DARO, a critic, a teacher
    layout     ranks and engines on the GPUs, the model on the ranks
    layers     options that models with latent or linear attention, sinks, or norms after attention cannot have
    lora       adapters: of which matrices, and which of them servers can get
    engine     servers, how weights reach them, sharing GPUs with ranks, quantized servers
    trainer    the run's steps, rewards, environment, reporting
    unread     options that nothing reads, given the other options: refused, or warnings
    advice     settings that work but are probably not intended: warnings

checks.py runs all of them, together with the rules for files (model_files.py), for fp8 (precision.py) and for
upstream's options (megatron_options.py).
"""
