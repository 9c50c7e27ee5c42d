"""The table of `pagefleet status`: what stands there, and only where there is something to say."""

from rich.console import Console

from pagefleet.cluster.status_view import replica_table
from pagefleet.protos import inference_pb2 as pb


def text_of(*replicas: pb.ReplicaState) -> str:
    console = Console(width=140, no_color=True)
    with console.capture() as capture:
        console.print(replica_table(pb.GetClusterStateResponse(replicas=replicas)))
    return capture.get()


def test_guesses_are_shown_where_there_are_some():
    plain = pb.ReplicaState(replica_id="replica-0", model="m")
    guessing = pb.ReplicaState(
        replica_id="replica-1", model="m", draft_tokens=1200, accepted_tokens=900
    )
    assert "guessed right" not in text_of(plain)
    text = text_of(plain, guessing)
    assert "guessed right" in text and "900 of 1,200" in text
