"""From prompts to batches of scored groups. Who waits for whom:

    Controller._generate             its turn (batches_ahead), then the lock of the engine
      Sampler.sample                 one batch
        BatchFiller.fill             the next call that ends, until the batch is complete
          calls in flight            one for a round of groups, or one for each group (filling.py)
            Rollouter.generate       the engine: an answer (SingleTurn), or turn by turn (environments/)
            RolloutCollector.score   the verifiers, while other answers are still generated
    Controller._train                the next SampledBatch; after its last step the engine gets the weights
    Evaluations                      the engine, beside generation or between two batches

All that is awaited outside the loop has a limit of `Deadlines` (deadlines.py); so what one part of the loop waits for
in another ends, too. The first failure ends everything that is in flight.

Files, in the order to read them:

    protocol.py             what the loop expects of engine, rollouter, scorer, prompts, policy
    pace.py                 how many batches generation runs ahead
    ledger.py               the books: each group is outstanding, trained, filtered or dropped
    groups_under_way.py     a group that is not complete: in flight, and between two batches
    rollouter.py            single answers, and how verdicts are asked for
    merged.py               what several engines or environments give, as one stream
    collector.py            which answers count, and their verdicts
    batch_so_far.py         a batch in the making: kept, filtered, dropped
    filling.py              the ways to fill a batch: when it is complete, which groups begin
    batch_filler.py         the loop that fills a batch
    sampler.py              from batch to batch: what is kept, too old, empty; the snapshot
    sampled_batch.py        what the controller gets
    minibatches.py          which groups train at which optimizer step
    skipped_steps.py        steps that were skipped: counted, or the end of the run
    summary.py              metrics of groups; new ones are added here
    no_signal.py            what to tell people when answers teach nothing
    evaluation.py           accuracy on held-out problems while a run trains

    group_columns.py        groups as Parquet columns
    recorder.py             the files of a run's rollouts
    replay.py               recorded batches in the sampler's place
"""
