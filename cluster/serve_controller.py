"""The controller of a Serve application: one by name, found or made by whoever needs it first.

It belongs to no replica and no gateway, and outlives rolling updates of both; once nobody has
called it for a while, the application is gone and it goes too.
"""

from ray.actor import ActorHandle

from .admission import AdmissionConfig
from .controller import ControllerConfig
from .controller_actor import ControllerActor, start_controller
from .serve_args import ServeArgs

NAMESPACE = "pagefleet"
_LINGER_S = 60.0


def shared_controller(app_name: str, args: ServeArgs) -> ActorHandle[ControllerActor]:
    """The application's controller. One that is there already keeps the settings it has."""
    config = ControllerConfig(
        admission=AdmissionConfig(hold_s=args.hold_s, max_queue_s=args.max_queue_s)
    )
    return start_controller(
        config, name=f"controller-{app_name}", namespace=NAMESPACE, linger_s=_LINGER_S
    )
