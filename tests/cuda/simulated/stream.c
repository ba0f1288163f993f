// Streams, events, capture and graphs. A stream does its work at once.
#include "simulated.h"

struct CUevent_st {
    bool recorded;
    // The number of the capture in which the event was last recorded; 0: none.
    cuuint64_t capture;
    CUstream stream;
};

#define MAX_STREAMS 64
static CUstream streams[MAX_STREAMS];
// How many captures have begun; also the number of the latest capture.
static cuuint64_t captures;
// The mode that this thread has set by cuThreadExchangeStreamCaptureMode.
static _Thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

// Whether a stream is a default stream. Default streams are constants, not objects.
static bool is_default(CUstream stream) { return !stream || stream == CU_STREAM_LEGACY; }

static bool active(CUstream stream) { return !is_default(stream) && stream->status != CU_STREAM_CAPTURE_STATUS_NONE; }

bool simulated_capturing(CUstream stream) { return !is_default(stream) && stream->status == CU_STREAM_CAPTURE_STATUS_ACTIVE; }

static CUresult invalidate(const char *call, CUstream stream, CUresult status, const char *why) {
    stream->status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    return simulated_fail(call, status, why);
}

CUresult simulated_unsafe(const char *call) {
    if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
    CUresult status = CUDA_SUCCESS;
    for (int i = 0; i < MAX_STREAMS; i++) {
        CUstream stream = streams[i];
        if (!active(stream) || stream->mode == CU_STREAM_CAPTURE_MODE_RELAXED) continue;
        // A capture of another thread forbids the call only if the capture and this thread have the mode "global".
        bool mine = pthread_equal(stream->thread, pthread_self());
        if (!mine && (stream->mode != CU_STREAM_CAPTURE_MODE_GLOBAL || thread_mode != CU_STREAM_CAPTURE_MODE_GLOBAL)) continue;
        status = invalidate(call, stream, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "while-capturing");
    }
    return status;
}

static bool exists(CUstream stream) {
    for (int i = 0; i < MAX_STREAMS; i++)
        if (streams[i] == stream) return true;
    return false;
}

// A call on the default stream fails while a blocking stream is captured, because the default stream would wait for the blocking stream.
static CUresult check_default(const char *call) {
    for (int i = 0; i < MAX_STREAMS; i++)
        if (active(streams[i]) && streams[i]->blocking)
            return invalidate(call, streams[i], CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "default-stream");
    return CUDA_SUCCESS;
}

CUresult simulated_stream(const char *call, CUstream stream) {
    TRY(simulated_ready(true));
    if (is_default(stream)) return check_default(call);
    if (!exists(stream)) return simulated_fail(call, CUDA_ERROR_INVALID_HANDLE, "stream");
    if (stream->status == CU_STREAM_CAPTURE_STATUS_INVALIDATED)
        return simulated_fail(call, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "capture-failed-before");
    return CUDA_SUCCESS;
}

static void fill(const struct CUgraphNode_st *node) {
    if (node->width == 1) {
        memset(node->to, (int)node->value, node->bytes);
        return;
    }
    for (size_t i = 0; i < node->bytes; i += node->width) memcpy(node->to + i, &node->value, node->width);
}

static void perform(const struct CUgraphNode_st *node) {
    switch (node->kind) {
    case COPY: memmove(node->to, node->from, node->bytes); break;
    case FILL: fill(node); break;
    case HOST: node->function(node->to); break;
    default: break;
    }
}

void simulated_queue(CUstream stream, struct CUgraphNode_st node) {
    if (!simulated_capturing(stream)) {
        perform(&node);
        return;
    }
    CUgraph graph = stream->graph;
    if (graph->count == graph->capacity) {
        graph->capacity = graph->capacity ? 2 * graph->capacity : 256;
        graph->nodes = realloc(graph->nodes, graph->capacity * sizeof node);
        if (!graph->nodes) abort();
    }
    graph->nodes[graph->count++] = node;
    // If the stream has joined a capture that began on another stream, that stream has to wait for this work before the capture ends.
    stream->ahead = stream->joined;
}

// The number of a stream in the log: 0 for a default stream.
int simulated_number(CUstream stream) {
    for (int i = 0; i < MAX_STREAMS; i++)
        if (stream && streams[i] == stream) return i + 1;
    return 0;
}

static CUresult create(CUstream *made, unsigned flags) {
    TRY(simulated_ready(true));
    for (int i = 0; i < MAX_STREAMS; i++) {
        if (streams[i]) continue;
        *made = streams[i] = calloc(1, sizeof **made);
        if (!*made) abort();
        (*made)->context = simulated_context;
        (*made)->blocking = !(flags & CU_STREAM_NON_BLOCKING);
        return CUDA_SUCCESS;
    }
    return simulated_fail("cuStreamCreate", CUDA_ERROR_OUT_OF_MEMORY, "too-many-streams");
}
CUresult cuStreamCreate(CUstream *stream, unsigned flags) { LOCKED(create(stream, flags)); }
CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
    (void)priority;
    LOCKED(create(stream, flags));
}

static void discard(CUgraph graph) {
    if (graph) free(graph->nodes);
    free(graph);
}

static CUresult destroy(CUstream stream) {
    for (int i = 0; i < MAX_STREAMS; i++) {
        if (!stream || streams[i] != stream) continue;
        if (!stream->joined) discard(stream->graph);
        free(stream);
        streams[i] = NULL;
        return CUDA_SUCCESS;
    }
    return simulated_fail("cuStreamDestroy", CUDA_ERROR_INVALID_HANDLE, "stream");
}
CUresult cuStreamDestroy(CUstream stream) { LOCKED(destroy(stream)); }

CUresult simulated_synchronize(const char *call, CUstream stream) {
    TRY(simulated_stream(call, stream));
    if (active(stream)) return invalidate(call, stream, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "while-capturing");
    simulated_log("synchronize call=%s", call);
    return CUDA_SUCCESS;
}
CUresult cuStreamSynchronize(CUstream stream) { LOCKED(simulated_synchronize("cuStreamSynchronize", stream)); }

static CUresult synchronize_context(void) {
    for (int i = 0; i < MAX_STREAMS; i++)
        if (active(streams[i]) && streams[i]->context == simulated_context)
            return invalidate("cuCtxSynchronize", streams[i], CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "while-capturing");
    return simulated_synchronize("cuCtxSynchronize", NULL);
}
CUresult cuCtxSynchronize(void) { LOCKED(synchronize_context()); }

static CUresult query(CUstream stream) {
    TRY(simulated_stream("cuStreamQuery", stream));
    if (active(stream)) return invalidate("cuStreamQuery", stream, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "while-capturing");
    return CUDA_SUCCESS;
}
CUresult cuStreamQuery(CUstream stream) { LOCKED(query(stream)); }

CUresult cuStreamGetCtx(CUstream stream, CUcontext *context) {
    *context = stream ? stream->context : simulated_context;
    return CUDA_SUCCESS;
}

static CUresult host_function(CUstream stream, CUhostFn function, void *data) {
    TRY(simulated_stream("cuLaunchHostFunc", stream));
    simulated_log("host-function captured=%d", simulated_capturing(stream));
    simulated_queue(stream, (struct CUgraphNode_st){.kind = HOST, .function = function, .to = data});
    return CUDA_SUCCESS;
}
CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data) { LOCKED(host_function(stream, function, data)); }

CUresult cuEventCreate(CUevent *event, unsigned flags) {
    (void)flags;
    *event = calloc(1, sizeof **event);
    return *event ? simulated_ready(true) : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuEventDestroy(CUevent event) {
    free(event);
    return CUDA_SUCCESS;
}

static CUresult record(CUevent event, CUstream stream) {
    TRY(simulated_stream("cuEventRecord", stream));
    event->recorded = true;
    event->capture = simulated_capturing(stream) ? stream->capture : 0;
    event->stream = stream;
    simulated_log("record event=%p stream=%d captured=%d", (void *)event, simulated_number(stream), simulated_capturing(stream));
    return CUDA_SUCCESS;
}
CUresult cuEventRecord(CUevent event, CUstream stream) { LOCKED(record(event, stream)); }

static CUresult event_done(const char *call, CUevent event) {
    TRY(simulated_ready(true));
    TRY(simulated_unsafe(call));
    if (event->capture) return simulated_fail(call, CUDA_ERROR_CAPTURED_EVENT, "captured-event");
    // The S of cuEventSynchronize; cuEventQuery is not logged.
    if (call[7] == 'S') simulated_log("synchronize call=%s", call);
    return CUDA_SUCCESS;
}
CUresult cuEventSynchronize(CUevent event) { LOCKED(event_done("cuEventSynchronize", event)); }
CUresult cuEventQuery(CUevent event) { LOCKED(event_done("cuEventQuery", event)); }
CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) {
    *milliseconds = 0;
    return start->recorded && end->recorded ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

static CUresult wait(CUstream stream, CUevent event) {
    TRY(simulated_stream("cuStreamWaitEvent", stream));
    if (event->capture) {
        if (!exists(event->stream) || !simulated_capturing(event->stream) || event->stream->capture != event->capture)
            return simulated_fail("cuStreamWaitEvent", CUDA_ERROR_INVALID_VALUE, "event-of-a-capture-that-is-over");
        if (simulated_capturing(stream) && stream->capture != event->capture)
            return invalidate("cuStreamWaitEvent", stream, CUDA_ERROR_STREAM_CAPTURE_MERGE, "two-captures");
        if (!simulated_capturing(stream)) {
            // The stream joins the capture: its work goes into the graph of the capture.
            stream->status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
            stream->mode = event->stream->mode;
            stream->thread = event->stream->thread;
            stream->capture = event->capture;
            stream->graph = event->stream->graph;
            stream->joined = true;
        } else if (!stream->joined) {
            // The stream where the capture began waits for the event's stream.
            event->stream->ahead = false;
        }
    } else if (event->recorded && simulated_capturing(stream)) {
        return invalidate("cuStreamWaitEvent", stream, CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "event-from-outside");
    }
    simulated_log("wait event=%p stream=%d captured=%d", (void *)event, simulated_number(stream), simulated_capturing(stream));
    return CUDA_SUCCESS;
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    (void)flags;
    LOCKED(wait(stream, event));
}

static CUresult begin(CUstream stream, CUstreamCaptureMode mode) {
    TRY(simulated_stream("cuStreamBeginCapture", stream));
    if (!stream || active(stream)) return simulated_fail("cuStreamBeginCapture", CUDA_ERROR_ILLEGAL_STATE, "stream");
    stream->status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    stream->mode = mode;
    stream->thread = pthread_self();
    stream->capture = ++captures;
    stream->graph = calloc(1, sizeof *stream->graph);
    if (!stream->graph) abort();
    simulated_log("capture-begin mode=%d", mode);
    return CUDA_SUCCESS;
}
CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) { LOCKED(begin(stream, mode)); }

static CUresult end(CUstream stream, CUgraph *graph) {
    *graph = NULL;
    if (!exists(stream) || !active(stream) || stream->joined)
        return simulated_fail("cuStreamEndCapture", CUDA_ERROR_ILLEGAL_STATE, "stream");
    bool valid = simulated_capturing(stream);
    bool elsewhere = stream->mode != CU_STREAM_CAPTURE_MODE_RELAXED && !pthread_equal(stream->thread, pthread_self());
    if (elsewhere) return invalidate("cuStreamEndCapture", stream, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "thread");
    CUgraph captured = stream->graph;
    stream->graph = NULL;
    stream->status = CU_STREAM_CAPTURE_STATUS_NONE;
    bool ahead = false;
    for (int i = 0; i < MAX_STREAMS; i++) {
        CUstream other = streams[i];
        if (!other || !other->joined || other->capture != stream->capture) continue;
        ahead |= other->ahead;
        other->graph = NULL;
        other->status = CU_STREAM_CAPTURE_STATUS_NONE;
        other->joined = other->ahead = false;
    }
    simulated_log("capture-end valid=%d nodes=%zu", valid, captured->count);
    if (valid && ahead) {
        discard(captured);
        return simulated_fail("cuStreamEndCapture", CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "work-of-another-stream");
    }
    if (!valid) {
        discard(captured);
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    *graph = captured;
    return CUDA_SUCCESS;
}
CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) { LOCKED(end(stream, graph)); }

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    TRY(simulated_ready(true));
    *status = stream ? stream->status : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                const CUgraphNode **dependencies, const CUgraphEdgeData **edges, size_t *count) {
    TRY(cuStreamIsCapturing(stream, status));
    bool capturing = simulated_capturing(stream);
    if (id) *id = capturing ? stream->capture : 0;
    if (graph) *graph = capturing ? stream->graph : NULL;
    if (dependencies) *dependencies = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    return CUDA_SUCCESS;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    CUstreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count) {
    for (size_t i = 0; nodes && i < *count && i < graph->count; i++) nodes[i] = &graph->nodes[i];
    *count = graph->count;
    return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph graph) {
    discard(graph);
    return CUDA_SUCCESS;
}

static CUresult instantiate(CUgraphExec *made, CUgraph graph) {
    TRY(simulated_ready(true));
    CUgraphExec executable = calloc(1, sizeof *executable);
    if (!executable) abort();
    executable->graph.count = graph->count;
    executable->graph.nodes = malloc((graph->count + 1) * sizeof *graph->nodes);
    if (!executable->graph.nodes) abort();
    memcpy(executable->graph.nodes, graph->nodes, graph->count * sizeof *graph->nodes);
    for (size_t i = 0; i < graph->count; i++) executable->counts[graph->nodes[i].kind]++;
    simulated_log("instantiate nodes=%zu", graph->count);
    *made = executable;
    return CUDA_SUCCESS;
}
CUresult cuGraphInstantiate(CUgraphExec *made, CUgraph graph, unsigned long long flags) {
    (void)flags;
    LOCKED(instantiate(made, graph));
}

CUresult cuGraphUpload(CUgraphExec executable, CUstream stream) {
    (void)executable;
    LOCKED(simulated_stream("cuGraphUpload", stream));
}

static CUresult launch(CUgraphExec executable, CUstream stream) {
    TRY(simulated_stream("cuGraphLaunch", stream));
    if (active(stream)) return invalidate("cuGraphLaunch", stream, CUDA_ERROR_NOT_SUPPORTED, "graph-in-graph-is-not-simulated");
    const size_t *counts = executable->counts;
    simulated_log("replay kernels=%zu products=%zu copies=%zu fills=%zu allocations=%zu", counts[LAUNCH], counts[PRODUCT],
                  counts[COPY], counts[FILL], counts[ALLOCATE]);
    for (size_t i = 0; i < executable->graph.count; i++) perform(&executable->graph.nodes[i]);
    return CUDA_SUCCESS;
}
CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream) { LOCKED(launch(executable, stream)); }

CUresult cuGraphExecDestroy(CUgraphExec executable) {
    free(executable->graph.nodes);
    free(executable);
    return CUDA_SUCCESS;
}

static CUresult product(CUstream stream, const char *text, const struct simulated_range *ranges, int count) {
    TRY(simulated_stream("product", stream));
    for (int i = 0; i < count; i++)
        if (!simulated_covers(ranges[i].address, ranges[i].bytes)) {
            simulated_log("refused status=700 why=operand-%d-is-not-within-an-allocation %s", i, text + strlen("product "));
            return CUDA_ERROR_ILLEGAL_ADDRESS;
        }
    simulated_log("%s captured=%d", text, simulated_capturing(stream));
    simulated_queue(stream, (struct CUgraphNode_st){.kind = PRODUCT});
    return CUDA_SUCCESS;
}
CUresult simulatedProduct(CUstream stream, const char *text, const struct simulated_range *ranges, int count) {
    LOCKED(product(stream, text, ranges, count));
}
