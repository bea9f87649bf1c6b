"""Run by an interpreter with vLLM: records the cases that come in on stdin, one JSON per line.

python recorder.py ORACLE_SCRIPT
"""

import contextlib
import importlib.util
import io
import json
import os
import signal
import sys

SECONDS_PER_CASE = 30


def load(path):
    spec = importlib.util.spec_from_file_location("oracle", path)
    oracle = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(oracle)
    return oracle


def record(oracle, case):
    def give_up(signum, frame):
        raise TimeoutError("took too long")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(SECONDS_PER_CASE)
    try:
        return {"text": oracle.Run(case).run().result()}
    except Exception as error:  # whatever vLLM refuses or trips over is an answer
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        signal.alarm(0)


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints is not an answer
    oracle = load(sys.argv[1])
    for line in sys.stdin:
        with contextlib.redirect_stdout(io.StringIO()):
            answer = record(oracle, json.loads(line))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


main()
