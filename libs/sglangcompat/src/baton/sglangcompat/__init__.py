"""SGLang's public scheduler contract over a worker's own front: what lets a gateway that is not ours drive prefill and decode servers."""

from baton.sglangcompat.claims import Claims, Publications
from baton.sglangcompat.door import Door
from baton.sglangcompat.errors import ModelFilesError, SglangError
from baton.sglangcompat.peering import Peering

__all__ = ["Claims", "Door", "ModelFilesError", "Peering", "Publications", "SglangError"]
