// NCCL: processes meet in shared memory that the unique id names. Sums are not computed. All ranks must make the same calls in the same
// order: the first rank to make a call defines it, and a different call of another rank fails.
//
// Environment: SIMULATED_NCCL_VERSION is the version. SIMULATED_NCCL_FAIL=init makes ncclCommInitRankConfig fail. SIMULATED_NCCL_FAIL=N
// makes ncclCommGetAsyncError report an error after the communicator's Nth collective operation, counted from 1.
#include "simulated.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SUCCESS = 0, UNHANDLED = 1, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE = 6, IN_PROGRESS = 7 };
// POLLS is the number of calls of ncclCommGetAsyncError after init, or after finalize, that report IN_PROGRESS.
enum { MAX_RANKS = 8, MAX_CALLS = 1 << 16, POLLS = 3 };
// A call's `kind` is NOT_MADE before any rank makes the call, WRITING while the first rank sets the properties, and then the `kind` that
// `queue` got.
enum { NOT_MADE = 0, WRITING = 99 };

struct id {
    char name[128];
};

struct config {
    size_t size;
    unsigned magic, version;
    int blocking;
};

struct call {
    atomic_uint kind;
    atomic_uint type, root;
    atomic_ulong count;
};

struct meeting {
    atomic_int arrived[MAX_RANKS];
    struct call calls[MAX_CALLS];
};

struct comm {
    struct meeting *meeting;
    int rank, size;
    int polls; // How many of the POLLS remain.
    int calls; // The number of collective operations so far: the index of the next one in `meeting->calls`.
    int error;
    bool finalized;
    struct id id;
};

static int pending = 0; // The number of open groups.

static int refuse(int status, const char *why) {
    char text[160];
    snprintf(text, sizeof text, "refused call=nccl status=%d why=%s", status, why);
    simulatedLog(text);
    return status;
}

int ncclGetVersion(int *version) {
    const char *given = getenv("SIMULATED_NCCL_VERSION");
    *version = given ? atoi(given) : 22707;
    return SUCCESS;
}
const char *ncclGetErrorString(int status) {
    switch (status) {
    case INVALID_USAGE: return "invalid usage";
    case INVALID_ARGUMENT: return "invalid argument";
    case REMOTE: return "remote process exited or there was a network error";
    default: return "unhandled cuda error";
    }
}
const char *ncclGetLastError(struct comm *comm) {
    (void)comm;
    return "";
}
int ncclGetUniqueId(struct id *id) {
    memset(id, 0, sizeof *id);
    snprintf(id->name, sizeof id->name, "/tc-nccl-%d-%ld", (int)getpid(), random());
    return SUCCESS;
}

// The size of an element of an `ncclDataType_t`; 0 for unknown types.
static size_t bytes_of(int type) {
    switch (type) {
    case 0: case 1: return 1;
    case 2: case 3: case 7: return 4;
    case 4: case 5: case 8: return 8;
    case 6: case 9: return 2;
    default: return 0;
    }
}

int ncclCommInitRankConfig(struct comm **made, int size, struct id id, int rank, struct config *config) {
    // The magic number of nccl.h, and the version and size of ncclConfig_t of NCCL 2.27.
    if (config->magic != 0xcafebeef || config->version < 22700 || config->size < 72) return refuse(INVALID_ARGUMENT, "config");
    if (config->blocking != 0) return refuse(INVALID_USAGE, "blocking");
    CUcontext context = NULL;
    if (cuCtxGetCurrent(&context) != CUDA_SUCCESS || !context) return refuse(UNHANDLED, "no-context");
    if (size > MAX_RANKS || rank < 0 || rank >= size) return refuse(INVALID_ARGUMENT, "rank");
    const char *fail = getenv("SIMULATED_NCCL_FAIL");
    if (fail && !strcmp(fail, "init")) return refuse(REMOTE, "asked");
    int file = shm_open(id.name, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, sizeof(struct meeting))) return refuse(UNHANDLED, "shared-memory");
    struct meeting *meeting = mmap(NULL, sizeof *meeting, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (meeting == MAP_FAILED) return refuse(UNHANDLED, "shared-memory");
    if (atomic_fetch_add(&meeting->arrived[rank], 1)) return refuse(INVALID_USAGE, "rank-twice");
    struct comm *comm = calloc(1, sizeof *comm);
    comm->meeting = meeting, comm->rank = rank, comm->size = size, comm->polls = POLLS, comm->id = id;
    *made = comm;
    char text[80];
    snprintf(text, sizeof text, "nccl op=init rank=%d size=%d", rank, size);
    simulatedLog(text);
    return IN_PROGRESS;
}

static bool all_arrived(struct comm *comm) {
    for (int rank = 0; rank < comm->size; rank++)
        if (!atomic_load(&comm->meeting->arrived[rank])) return false;
    if (comm->rank == 0 && comm->id.name[0]) {
        shm_unlink(comm->id.name);
        comm->id.name[0] = 0;
    }
    return true;
}

int ncclCommGetAsyncError(struct comm *comm, int *state) {
    if (comm->error)
        *state = comm->error;
    else if (comm->polls > 0)
        comm->polls--, *state = IN_PROGRESS;
    else
        *state = all_arrived(comm) ? SUCCESS : IN_PROGRESS;
    return SUCCESS;
}

// Whether the arguments equal those with which the first rank made the call. If this rank is the first, store its arguments in `call`.
static bool agrees(struct call *call, unsigned kind, unsigned type, unsigned root, unsigned long count) {
    unsigned none = NOT_MADE;
    if (atomic_compare_exchange_strong(&call->kind, &none, WRITING)) {
        atomic_store(&call->type, type), atomic_store(&call->root, root), atomic_store(&call->count, count);
        atomic_store(&call->kind, kind);
        return true;
    }
    while (atomic_load(&call->kind) == WRITING) usleep(10);
    return atomic_load(&call->kind) == kind && atomic_load(&call->type) == type && atomic_load(&call->root) == root &&
           atomic_load(&call->count) == count;
}

static int queue(struct comm *comm, const char *op, unsigned kind, const void *from, void *to, size_t count, int type, int root,
                 CUstream stream) {
    if (comm->finalized) return refuse(INVALID_USAGE, "after-finalize");
    // Init must be complete: the caller has polled until SUCCESS.
    if (comm->polls > 0 || !all_arrived(comm)) return refuse(INVALID_USAGE, "before-the-last-call-was-taken");
    if (!bytes_of(type)) return refuse(INVALID_ARGUMENT, "type");
    if (stream->status != CU_STREAM_CAPTURE_STATUS_NONE) return refuse(INVALID_USAGE, "while-capturing");
    if (comm->calls == MAX_CALLS) return refuse(UNHANDLED, "too-many-calls");
    if (!agrees(&comm->meeting->calls[comm->calls++], kind, type, root, count)) return refuse(INVALID_USAGE, "ranks-differ");
    const char *fail = getenv("SIMULATED_NCCL_FAIL");
    if (fail && atoi(fail) == comm->calls) comm->error = REMOTE;
    char text[160];
    snprintf(text, sizeof text, "nccl op=%s rank=%d count=%zu type=%d in_place=%d group=%d", op, comm->rank, count, type, from == to,
             pending);
    const struct simulated_range ranges[] = {{(CUdeviceptr)(uintptr_t)from, count * bytes_of(type)},
                                             {(CUdeviceptr)(uintptr_t)to, count * bytes_of(type)}};
    // In spite of its name, this function queues any operation of a library: it logs `text` and checks the ranges.
    return simulatedProduct(stream, text, ranges, 2) == CUDA_SUCCESS ? SUCCESS : UNHANDLED;
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, struct comm *comm, CUstream stream) {
    if (operation != 0) return refuse(INVALID_ARGUMENT, "operation");
    return queue(comm, "all_reduce", 1, from, to, count, type, 0, stream);
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, struct comm *comm, CUstream stream) {
    return queue(comm, "broadcast", 2, from, to, count, type, root, stream);
}
int ncclGroupStart(void) {
    pending++;
    return SUCCESS;
}
int ncclGroupEnd(void) { return --pending < 0 ? refuse(INVALID_USAGE, "no-group") : IN_PROGRESS; }

int ncclCommFinalize(struct comm *comm) {
    if (comm->finalized) return refuse(INVALID_USAGE, "finalized-twice");
    comm->finalized = true, comm->polls = POLLS;
    return IN_PROGRESS;
}
static int release(struct comm *comm, const char *op) {
    char text[80];
    snprintf(text, sizeof text, "nccl op=%s rank=%d", op, comm->rank);
    simulatedLog(text);
    munmap(comm->meeting, sizeof *comm->meeting);
    free(comm);
    return SUCCESS;
}
int ncclCommDestroy(struct comm *comm) { return comm->finalized ? release(comm, "destroy") : refuse(INVALID_USAGE, "not-finalized"); }
int ncclCommAbort(struct comm *comm) { return release(comm, "abort"); }
