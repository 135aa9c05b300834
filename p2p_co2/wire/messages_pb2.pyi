from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Missed(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNSAID: _ClassVar[Missed]
    NOT_ASKED: _ClassVar[Missed]
    LATE: _ClassVar[Missed]
    NO_ROOM: _ClassVar[Missed]
    NOT_AWAITED: _ClassVar[Missed]
    HOSTILE: _ClassVar[Missed]
UNSAID: Missed
NOT_ASKED: Missed
LATE: Missed
NO_ROOM: Missed
NOT_AWAITED: Missed
HOSTILE: Missed

class Envelope(_message.Message):
    __slots__ = ("version", "run", "ping", "pong", "leave", "revoked", "ready", "waiting", "begin", "part", "mean", "result", "decision", "ask_outcome", "behind", "fetch", "manifest", "chunk", "refusal", "model_table", "neighbour", "forward", "backward", "declined", "dropped")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    ASK_OUTCOME_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    MODEL_TABLE_FIELD_NUMBER: _ClassVar[int]
    NEIGHBOUR_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    version: int
    run: bytes
    ping: Ping
    pong: Pong
    leave: Leave
    revoked: Revoked
    ready: Ready
    waiting: Waiting
    begin: Begin
    part: Part
    mean: Mean
    result: Result
    decision: Decision
    ask_outcome: AskOutcome
    behind: Behind
    fetch: Fetch
    manifest: Manifest
    chunk: Chunk
    refusal: Refusal
    model_table: ModelTable
    neighbour: Neighbour
    forward: Forward
    backward: Backward
    declined: Declined
    dropped: Dropped
    def __init__(self, version: _Optional[int] = ..., run: _Optional[bytes] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., revoked: _Optional[_Union[Revoked, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ..., begin: _Optional[_Union[Begin, _Mapping]] = ..., part: _Optional[_Union[Part, _Mapping]] = ..., mean: _Optional[_Union[Mean, _Mapping]] = ..., result: _Optional[_Union[Result, _Mapping]] = ..., decision: _Optional[_Union[Decision, _Mapping]] = ..., ask_outcome: _Optional[_Union[AskOutcome, _Mapping]] = ..., behind: _Optional[_Union[Behind, _Mapping]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ..., manifest: _Optional[_Union[Manifest, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., model_table: _Optional[_Union[ModelTable, _Mapping]] = ..., neighbour: _Optional[_Union[Neighbour, _Mapping]] = ..., forward: _Optional[_Union[Forward, _Mapping]] = ..., backward: _Optional[_Union[Backward, _Mapping]] = ..., declined: _Optional[_Union[Declined, _Mapping]] = ..., dropped: _Optional[_Union[Dropped, _Mapping]] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("phase", "position", "versions", "digests", "upload_bytes_per_s", "download_bytes_per_s", "settled", "heartbeat_s", "finished", "process", "model", "counted", "name", "visits")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        JOINING: _ClassVar[Status.Phase]
        TRAINING: _ClassVar[Status.Phase]
        DRAINING: _ClassVar[Status.Phase]
        PAUSED: _ClassVar[Status.Phase]
    JOINING: Status.Phase
    TRAINING: Status.Phase
    DRAINING: Status.Phase
    PAUSED: Status.Phase
    PHASE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DOWNLOAD_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VISITS_FIELD_NUMBER: _ClassVar[int]
    phase: Status.Phase
    position: float
    versions: _containers.RepeatedScalarFieldContainer[int]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    upload_bytes_per_s: float
    download_bytes_per_s: float
    settled: bool
    heartbeat_s: float
    finished: bytes
    process: int
    model: int
    counted: bool
    name: str
    visits: bool
    def __init__(self, phase: _Optional[_Union[Status.Phase, str]] = ..., position: _Optional[float] = ..., versions: _Optional[_Iterable[int]] = ..., digests: _Optional[_Iterable[bytes]] = ..., upload_bytes_per_s: _Optional[float] = ..., download_bytes_per_s: _Optional[float] = ..., settled: bool = ..., heartbeat_s: _Optional[float] = ..., finished: _Optional[bytes] = ..., process: _Optional[int] = ..., model: _Optional[int] = ..., counted: bool = ..., name: _Optional[str] = ..., visits: bool = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("nonce", "sent_at", "status")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SENT_AT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    sent_at: float
    status: Status
    def __init__(self, nonce: _Optional[int] = ..., sent_at: _Optional[float] = ..., status: _Optional[_Union[Status, _Mapping]] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("nonce", "ping_sent_at", "status")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PING_SENT_AT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    ping_sent_at: float
    status: Status
    def __init__(self, nonce: _Optional[int] = ..., ping_sent_at: _Optional[float] = ..., status: _Optional[_Union[Status, _Mapping]] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Revoked(_message.Message):
    __slots__ = ("sealed",)
    SEALED_FIELD_NUMBER: _ClassVar[int]
    sealed: bytes
    def __init__(self, sealed: _Optional[bytes] = ...) -> None: ...

class ModelRow(_message.Message):
    __slots__ = ("name", "shape", "dtype", "trained", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    trained: bool
    digest: bytes
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., trained: bool = ..., digest: _Optional[bytes] = ...) -> None: ...

class ModelTable(_message.Message):
    __slots__ = ("model", "rows", "tensors", "numel")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    NUMEL_FIELD_NUMBER: _ClassVar[int]
    model: int
    rows: _containers.RepeatedCompositeFieldContainer[ModelRow]
    tensors: int
    numel: int
    def __init__(self, model: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[ModelRow, _Mapping]]] = ..., tensors: _Optional[int] = ..., numel: _Optional[int] = ...) -> None: ...

class RoundKey(_message.Message):
    __slots__ = ("fragment", "round", "attempt")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    round: int
    attempt: bytes
    def __init__(self, fragment: _Optional[int] = ..., round: _Optional[int] = ..., attempt: _Optional[bytes] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("fragment", "round", "base_version", "state_digest", "weight", "upload_bytes_per_s", "download_bytes_per_s", "last", "withdrawn", "offer_id")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DOWNLOAD_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    OFFER_ID_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    round: int
    base_version: int
    state_digest: bytes
    weight: float
    upload_bytes_per_s: float
    download_bytes_per_s: float
    last: bool
    withdrawn: bool
    offer_id: bytes
    def __init__(self, fragment: _Optional[int] = ..., round: _Optional[int] = ..., base_version: _Optional[int] = ..., state_digest: _Optional[bytes] = ..., weight: _Optional[float] = ..., upload_bytes_per_s: _Optional[float] = ..., download_bytes_per_s: _Optional[float] = ..., last: bool = ..., withdrawn: bool = ..., offer_id: _Optional[bytes] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("fragment", "round", "begins_within_s", "refusal")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BEGINS_WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    round: int
    begins_within_s: float
    refusal: str
    def __init__(self, fragment: _Optional[int] = ..., round: _Optional[int] = ..., begins_within_s: _Optional[float] = ..., refusal: _Optional[str] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("peer", "weight", "base_version", "offer_id")
    PEER_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    OFFER_ID_FIELD_NUMBER: _ClassVar[int]
    peer: str
    weight: float
    base_version: int
    offer_id: bytes
    def __init__(self, peer: _Optional[str] = ..., weight: _Optional[float] = ..., base_version: _Optional[int] = ..., offer_id: _Optional[bytes] = ...) -> None: ...

class PartSpec(_message.Message):
    __slots__ = ("owner", "start_block", "stop_block", "senders")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    START_BLOCK_FIELD_NUMBER: _ClassVar[int]
    STOP_BLOCK_FIELD_NUMBER: _ClassVar[int]
    SENDERS_FIELD_NUMBER: _ClassVar[int]
    owner: str
    start_block: int
    stop_block: int
    senders: bytes
    def __init__(self, owner: _Optional[str] = ..., start_block: _Optional[int] = ..., stop_block: _Optional[int] = ..., senders: _Optional[bytes] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("key", "members", "parts", "state_digest", "parts_within_s", "result_within_s", "nonce", "live")
    KEY_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PARTS_WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    RESULT_WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    key: RoundKey
    members: _containers.RepeatedCompositeFieldContainer[Member]
    parts: _containers.RepeatedCompositeFieldContainer[PartSpec]
    state_digest: bytes
    parts_within_s: float
    result_within_s: float
    nonce: bytes
    live: int
    def __init__(self, key: _Optional[_Union[RoundKey, _Mapping]] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., parts: _Optional[_Iterable[_Union[PartSpec, _Mapping]]] = ..., state_digest: _Optional[bytes] = ..., parts_within_s: _Optional[float] = ..., result_within_s: _Optional[float] = ..., nonce: _Optional[bytes] = ..., live: _Optional[int] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("key", "part", "generation", "offset", "total", "data")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    key: RoundKey
    part: int
    generation: int
    offset: int
    total: int
    data: bytes
    def __init__(self, key: _Optional[_Union[RoundKey, _Mapping]] = ..., part: _Optional[int] = ..., generation: _Optional[int] = ..., offset: _Optional[int] = ..., total: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Contributor(_message.Message):
    __slots__ = ("peer", "weight")
    PEER_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    peer: str
    weight: float
    def __init__(self, peer: _Optional[str] = ..., weight: _Optional[float] = ...) -> None: ...

class Mean(_message.Message):
    __slots__ = ("key", "part", "generation", "offset", "total", "data", "contributors", "signature", "missed")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    key: RoundKey
    part: int
    generation: int
    offset: int
    total: int
    data: bytes
    contributors: _containers.RepeatedCompositeFieldContainer[Contributor]
    signature: bytes
    missed: _containers.RepeatedScalarFieldContainer[Missed]
    def __init__(self, key: _Optional[_Union[RoundKey, _Mapping]] = ..., part: _Optional[int] = ..., generation: _Optional[int] = ..., offset: _Optional[int] = ..., total: _Optional[int] = ..., data: _Optional[bytes] = ..., contributors: _Optional[_Iterable[_Union[Contributor, _Mapping]]] = ..., signature: _Optional[bytes] = ..., missed: _Optional[_Iterable[_Union[Missed, str]]] = ...) -> None: ...

class PartOutcome(_message.Message):
    __slots__ = ("start_block", "stop_block", "digest", "contributors", "missed")
    START_BLOCK_FIELD_NUMBER: _ClassVar[int]
    STOP_BLOCK_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    start_block: int
    stop_block: int
    digest: bytes
    contributors: _containers.RepeatedCompositeFieldContainer[Contributor]
    missed: _containers.RepeatedScalarFieldContainer[Missed]
    def __init__(self, start_block: _Optional[int] = ..., stop_block: _Optional[int] = ..., digest: _Optional[bytes] = ..., contributors: _Optional[_Iterable[_Union[Contributor, _Mapping]]] = ..., missed: _Optional[_Iterable[_Union[Missed, str]]] = ...) -> None: ...

class LostPart(_message.Message):
    __slots__ = ("part", "generation")
    PART_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    part: int
    generation: int
    def __init__(self, part: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class SignedMean(_message.Message):
    __slots__ = ("part", "generation", "digest", "signature")
    PART_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    part: int
    generation: int
    digest: bytes
    signature: bytes
    def __init__(self, part: _Optional[int] = ..., generation: _Optional[int] = ..., digest: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("key", "digest", "signature", "lost", "gave_up", "again", "refused", "means")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    GAVE_UP_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    MEANS_FIELD_NUMBER: _ClassVar[int]
    key: RoundKey
    digest: bytes
    signature: bytes
    lost: _containers.RepeatedCompositeFieldContainer[LostPart]
    gave_up: bool
    again: bool
    refused: _containers.RepeatedCompositeFieldContainer[LostPart]
    means: _containers.RepeatedCompositeFieldContainer[SignedMean]
    def __init__(self, key: _Optional[_Union[RoundKey, _Mapping]] = ..., digest: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., lost: _Optional[_Iterable[_Union[LostPart, _Mapping]]] = ..., gave_up: bool = ..., again: bool = ..., refused: _Optional[_Iterable[_Union[LostPart, _Mapping]]] = ..., means: _Optional[_Iterable[_Union[SignedMean, _Mapping]]] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("key", "run", "coordinator", "state_digest", "members", "parts", "live")
    KEY_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    key: RoundKey
    run: bytes
    coordinator: str
    state_digest: bytes
    members: _containers.RepeatedCompositeFieldContainer[Member]
    parts: _containers.RepeatedCompositeFieldContainer[PartOutcome]
    live: int
    def __init__(self, key: _Optional[_Union[RoundKey, _Mapping]] = ..., run: _Optional[bytes] = ..., coordinator: _Optional[str] = ..., state_digest: _Optional[bytes] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., parts: _Optional[_Iterable[_Union[PartOutcome, _Mapping]]] = ..., live: _Optional[int] = ...) -> None: ...

class Vote(_message.Message):
    __slots__ = ("member", "signature")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    member: int
    signature: bytes
    def __init__(self, member: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("outcome", "votes")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    VOTES_FIELD_NUMBER: _ClassVar[int]
    outcome: bytes
    votes: _containers.RepeatedCompositeFieldContainer[Vote]
    def __init__(self, outcome: _Optional[bytes] = ..., votes: _Optional[_Iterable[_Union[Vote, _Mapping]]] = ...) -> None: ...

class AskOutcome(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: RoundKey
    def __init__(self, key: _Optional[_Union[RoundKey, _Mapping]] = ...) -> None: ...

class Behind(_message.Message):
    __slots__ = ("fragment", "round", "version", "state_digest", "donors")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DONORS_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    round: int
    version: int
    state_digest: bytes
    donors: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, fragment: _Optional[int] = ..., round: _Optional[int] = ..., version: _Optional[int] = ..., state_digest: _Optional[bytes] = ..., donors: _Optional[_Iterable[str]] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("what", "fragment", "version", "want_chunk", "chunk", "request", "newest")
    class What(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ROUND: _ClassVar[Fetch.What]
        STATE: _ClassVar[Fetch.What]
        BUFFERS: _ClassVar[Fetch.What]
    ROUND: Fetch.What
    STATE: Fetch.What
    BUFFERS: Fetch.What
    WHAT_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WANT_CHUNK_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    what: Fetch.What
    fragment: int
    version: int
    want_chunk: bool
    chunk: int
    request: int
    newest: int
    def __init__(self, what: _Optional[_Union[Fetch.What, str]] = ..., fragment: _Optional[int] = ..., version: _Optional[int] = ..., want_chunk: bool = ..., chunk: _Optional[int] = ..., request: _Optional[int] = ..., newest: _Optional[int] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("request", "what", "fragment", "version", "total_bytes", "chunk_bytes", "chunk_digests", "digest", "decision", "signature")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    request: int
    what: Fetch.What
    fragment: int
    version: int
    total_bytes: int
    chunk_bytes: int
    chunk_digests: _containers.RepeatedScalarFieldContainer[bytes]
    digest: bytes
    decision: Decision
    signature: bytes
    def __init__(self, request: _Optional[int] = ..., what: _Optional[_Union[Fetch.What, str]] = ..., fragment: _Optional[int] = ..., version: _Optional[int] = ..., total_bytes: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., chunk_digests: _Optional[_Iterable[bytes]] = ..., digest: _Optional[bytes] = ..., decision: _Optional[_Union[Decision, _Mapping]] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("request", "what", "fragment", "version", "chunk", "data")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    request: int
    what: Fetch.What
    fragment: int
    version: int
    chunk: int
    data: bytes
    def __init__(self, request: _Optional[int] = ..., what: _Optional[_Union[Fetch.What, str]] = ..., fragment: _Optional[int] = ..., version: _Optional[int] = ..., chunk: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("request", "reason", "newest_version", "again")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    request: int
    reason: str
    newest_version: int
    again: bool
    def __init__(self, request: _Optional[int] = ..., reason: _Optional[str] = ..., newest_version: _Optional[int] = ..., again: bool = ...) -> None: ...

class PeerRecord(_message.Message):
    __slots__ = ("peer", "run", "maddrs", "grpc_addresses", "certificate_digest", "software", "expires_at", "stage", "tokens_per_s", "visits", "badge")
    PEER_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    MADDRS_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    VISITS_FIELD_NUMBER: _ClassVar[int]
    BADGE_FIELD_NUMBER: _ClassVar[int]
    peer: str
    run: bytes
    maddrs: _containers.RepeatedScalarFieldContainer[str]
    grpc_addresses: _containers.RepeatedScalarFieldContainer[str]
    certificate_digest: bytes
    software: str
    expires_at: float
    stage: int
    tokens_per_s: float
    visits: bool
    badge: Badge
    def __init__(self, peer: _Optional[str] = ..., run: _Optional[bytes] = ..., maddrs: _Optional[_Iterable[str]] = ..., grpc_addresses: _Optional[_Iterable[str]] = ..., certificate_digest: _Optional[bytes] = ..., software: _Optional[str] = ..., expires_at: _Optional[float] = ..., stage: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., visits: bool = ..., badge: _Optional[_Union[Badge, _Mapping]] = ...) -> None: ...

class RunManifest(_message.Message):
    __slots__ = ("run", "config", "recipe_digest", "software", "protocol")
    RUN_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    RECIPE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    config: bytes
    recipe_digest: bytes
    software: str
    protocol: int
    def __init__(self, run: _Optional[bytes] = ..., config: _Optional[bytes] = ..., recipe_digest: _Optional[bytes] = ..., software: _Optional[str] = ..., protocol: _Optional[int] = ...) -> None: ...

class RunPosition(_message.Message):
    __slots__ = ("peer", "run", "position", "versions", "software", "written_at", "stage", "badge", "rounds")
    PEER_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_AT_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    BADGE_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    peer: str
    run: bytes
    position: float
    versions: _containers.RepeatedScalarFieldContainer[int]
    software: str
    written_at: float
    stage: int
    badge: Badge
    rounds: int
    def __init__(self, peer: _Optional[str] = ..., run: _Optional[bytes] = ..., position: _Optional[float] = ..., versions: _Optional[_Iterable[int]] = ..., software: _Optional[str] = ..., written_at: _Optional[float] = ..., stage: _Optional[int] = ..., badge: _Optional[_Union[Badge, _Mapping]] = ..., rounds: _Optional[int] = ...) -> None: ...

class Signed(_message.Message):
    __slots__ = ("signer", "content", "signature")
    SIGNER_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    signer: str
    content: bytes
    signature: bytes
    def __init__(self, signer: _Optional[str] = ..., content: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class LinkHello(_message.Message):
    __slots__ = ("from_peer", "to_peer", "run", "certificate_digest", "sent_at", "nonce", "badge")
    FROM_PEER_FIELD_NUMBER: _ClassVar[int]
    TO_PEER_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SENT_AT_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    BADGE_FIELD_NUMBER: _ClassVar[int]
    from_peer: str
    to_peer: str
    run: bytes
    certificate_digest: bytes
    sent_at: float
    nonce: bytes
    badge: Badge
    def __init__(self, from_peer: _Optional[str] = ..., to_peer: _Optional[str] = ..., run: _Optional[bytes] = ..., certificate_digest: _Optional[bytes] = ..., sent_at: _Optional[float] = ..., nonce: _Optional[bytes] = ..., badge: _Optional[_Union[Badge, _Mapping]] = ...) -> None: ...

class Certificate(_message.Message):
    __slots__ = ("person", "name", "expires_at", "watches")
    PERSON_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    WATCHES_FIELD_NUMBER: _ClassVar[int]
    person: bytes
    name: str
    expires_at: int
    watches: bool
    def __init__(self, person: _Optional[bytes] = ..., name: _Optional[str] = ..., expires_at: _Optional[int] = ..., watches: bool = ...) -> None: ...

class Badge(_message.Message):
    __slots__ = ("certificate", "by_run", "by_person")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    BY_RUN_FIELD_NUMBER: _ClassVar[int]
    BY_PERSON_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    by_run: bytes
    by_person: bytes
    def __init__(self, certificate: _Optional[bytes] = ..., by_run: _Optional[bytes] = ..., by_person: _Optional[bytes] = ...) -> None: ...

class Amendment(_message.Message):
    __slots__ = ("round", "setting", "value")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SETTING_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    round: int
    setting: str
    value: str
    def __init__(self, round: _Optional[int] = ..., setting: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class Revocation(_message.Message):
    __slots__ = ("run", "number", "persons", "amendments")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PERSONS_FIELD_NUMBER: _ClassVar[int]
    AMENDMENTS_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    number: int
    persons: _containers.RepeatedScalarFieldContainer[bytes]
    amendments: _containers.RepeatedCompositeFieldContainer[Amendment]
    def __init__(self, run: _Optional[bytes] = ..., number: _Optional[int] = ..., persons: _Optional[_Iterable[bytes]] = ..., amendments: _Optional[_Iterable[_Union[Amendment, _Mapping]]] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("run", "process", "after", "badge")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    BADGE_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    process: int
    after: int
    badge: Badge
    def __init__(self, run: _Optional[bytes] = ..., process: _Optional[int] = ..., after: _Optional[int] = ..., badge: _Optional[_Union[Badge, _Mapping]] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("run", "peer", "process", "first", "last", "newest", "sent_at", "events", "decisions", "again_in_s")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    SENT_AT_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    AGAIN_IN_S_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    peer: str
    process: int
    first: int
    last: int
    newest: int
    sent_at: float
    events: bytes
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    again_in_s: float
    def __init__(self, run: _Optional[bytes] = ..., peer: _Optional[str] = ..., process: _Optional[int] = ..., first: _Optional[int] = ..., last: _Optional[int] = ..., newest: _Optional[int] = ..., sent_at: _Optional[float] = ..., events: _Optional[bytes] = ..., decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ..., again_in_s: _Optional[float] = ...) -> None: ...

class Relayed(_message.Message):
    __slots__ = ("id", "peer", "request", "answer", "trouble", "peers")
    ID_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    id: int
    peer: str
    request: bytes
    answer: bytes
    trouble: str
    peers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[int] = ..., peer: _Optional[str] = ..., request: _Optional[bytes] = ..., answer: _Optional[bytes] = ..., trouble: _Optional[str] = ..., peers: _Optional[_Iterable[str]] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("run", "look", "dial_back", "send_bytes", "bulk")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LOOK_FIELD_NUMBER: _ClassVar[int]
    DIAL_BACK_FIELD_NUMBER: _ClassVar[int]
    SEND_BYTES_FIELD_NUMBER: _ClassVar[int]
    BULK_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    look: LookProbe
    dial_back: DialBackProbe
    send_bytes: int
    bulk: bytes
    def __init__(self, run: _Optional[bytes] = ..., look: _Optional[_Union[LookProbe, _Mapping]] = ..., dial_back: _Optional[_Union[DialBackProbe, _Mapping]] = ..., send_bytes: _Optional[int] = ..., bulk: _Optional[bytes] = ...) -> None: ...

class LookProbe(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DialBackProbe(_message.Message):
    __slots__ = ("port", "expect")
    PORT_FIELD_NUMBER: _ClassVar[int]
    EXPECT_FIELD_NUMBER: _ClassVar[int]
    port: int
    expect: bytes
    def __init__(self, port: _Optional[int] = ..., expect: _Optional[bytes] = ...) -> None: ...

class ProbeAnswer(_message.Message):
    __slots__ = ("refusal", "observed", "clock", "reached", "bulk")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    BULK_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    observed: str
    clock: float
    reached: bool
    bulk: bytes
    def __init__(self, refusal: _Optional[str] = ..., observed: _Optional[str] = ..., clock: _Optional[float] = ..., reached: bool = ..., bulk: _Optional[bytes] = ...) -> None: ...

class CircuitHop(_message.Message):
    __slots__ = ("type", "place", "limit", "status")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    type: int
    place: CircuitPlace
    limit: CircuitLimit
    status: int
    def __init__(self, type: _Optional[int] = ..., place: _Optional[_Union[CircuitPlace, _Mapping]] = ..., limit: _Optional[_Union[CircuitLimit, _Mapping]] = ..., status: _Optional[int] = ...) -> None: ...

class CircuitPlace(_message.Message):
    __slots__ = ("expires_at",)
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    expires_at: int
    def __init__(self, expires_at: _Optional[int] = ...) -> None: ...

class CircuitLimit(_message.Message):
    __slots__ = ("duration_s", "data_bytes")
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    DATA_BYTES_FIELD_NUMBER: _ClassVar[int]
    duration_s: int
    data_bytes: int
    def __init__(self, duration_s: _Optional[int] = ..., data_bytes: _Optional[int] = ...) -> None: ...

class MicrobatchKey(_message.Message):
    __slots__ = ("owner", "number")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    owner: int
    number: int
    def __init__(self, owner: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class Neighbour(_message.Message):
    __slots__ = ("stage", "meeting", "boundaries", "tokens_per_s", "granted")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    MEETING_FIELD_NUMBER: _ClassVar[int]
    BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    stage: int
    meeting: int
    boundaries: bytes
    tokens_per_s: float
    granted: int
    def __init__(self, stage: _Optional[int] = ..., meeting: _Optional[int] = ..., boundaries: _Optional[bytes] = ..., tokens_per_s: _Optional[float] = ..., granted: _Optional[int] = ...) -> None: ...

class Forward(_message.Message):
    __slots__ = ("key", "offset", "total", "data", "path")
    KEY_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    key: MicrobatchKey
    offset: int
    total: int
    data: bytes
    path: int
    def __init__(self, key: _Optional[_Union[MicrobatchKey, _Mapping]] = ..., offset: _Optional[int] = ..., total: _Optional[int] = ..., data: _Optional[bytes] = ..., path: _Optional[int] = ...) -> None: ...

class Backward(_message.Message):
    __slots__ = ("key", "tokens", "loss", "offset", "total", "data", "codec")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    key: MicrobatchKey
    tokens: int
    loss: float
    offset: int
    total: int
    data: bytes
    codec: int
    def __init__(self, key: _Optional[_Union[MicrobatchKey, _Mapping]] = ..., tokens: _Optional[int] = ..., loss: _Optional[float] = ..., offset: _Optional[int] = ..., total: _Optional[int] = ..., data: _Optional[bytes] = ..., codec: _Optional[int] = ...) -> None: ...

class Declined(_message.Message):
    __slots__ = ("key", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: MicrobatchKey
    reason: str
    def __init__(self, key: _Optional[_Union[MicrobatchKey, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class Dropped(_message.Message):
    __slots__ = ("key", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: MicrobatchKey
    reason: str
    def __init__(self, key: _Optional[_Union[MicrobatchKey, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...
