"""Conversations instead of single answers: with environments of several turns, and with agents. Who calls whom:

    BatchFiller                     rollout/: asks this Rollouter for groups as it asks SingleTurn
      Mixed.generate                where a run has several environments: each group to that of its problem
        Conversations.generate      one `Conversation` for each rollout, in a thread of the user's code
          SteppedConversations      turn by turn: a class with `reset` and `step`, in worker processes
          AgentConversations        an agent, over OpenAI's API: a coroutine, a program, or a taskset of verifiers
            Conversation.generate   the next turn
              TurnRequests.ask      the engine, from the run's loop

Files, in the order to read them:

    step.py                  what a class with `reset` and `step` offers: `Step`, which people import from here
    own.py                   what `environment.kind` names
    environment.py           one conversation of several turns, and what holds it
    context.py               one sequence of tokens of a conversation, as aligned columns
    rendering.py             what an environment says, as tokens
    conversations.py         many conversations
    thread.py                the thread of the user's coroutines
    turn_requests.py         what conversations ask of engine and verifiers
    several_environments.py  each group to the environment of its problem

    stepping.py              environments that answer turn by turn, in worker processes
    step_worker.py           the program of such a process

    agents.py                agents: coroutines and programs that speak OpenAI's API, and their outcomes
    agent_endpoint.py        OpenAI's API over HTTP
    agent_session.py         the chats of one rollout: which tokens a request continues
    agent_worker.py          the program of a process that runs one agent after the other
    verifiers_worker.py      runs tasks of the package verifiers, in a worker process
"""

from megatron_daro.environments.step import Step

__all__ = ["Step"]
