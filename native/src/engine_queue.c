/* engine_queue.c: one storage path: its thread, priorities, chunks in flight, retries.
 *
 * [Note: ownership] Other threads touch only `incoming`, `doomed`, `closing`, `cancelling` (under `mutex`), the counters
 * (atomic) and the backend's wake. Everything else belongs to the queue's thread.
 *
 * [Note: order] Requests of one operation and priority start in the order of submission. Chunks of
 * several requests are in flight at once; nothing waits for a request to end before the next one
 * starts, so the drive never runs dry between tensors.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine.h"

/* About a second in all. */
enum { BACKOFF_TRIES = 30, BACKOFF_DOUBLINGS = 10, BACKOFF_FIRST_NS = 50000 };
enum { MAX_RESUBMITS = 100 };

typedef struct tm_chunk tm_chunk;
struct tm_chunk {
  tm_transfer transfer; /* what is left of it; slot is fixed */
  tm_request *request;
  uint64_t at;          /* where it starts within the request */
  uint64_t length;
  uint64_t moved;       /* bytes known to be done, from the start */
  uint64_t last_end;    /* where the last short transfer ended; UINT64_MAX at first */
  uint64_t shorten_to;  /* injected: the next transfer reports at most this; 0 = none */
  uint64_t submit_errors; /* injected: so many submissions fail with submit_errno */
  int32_t submit_errno;
  uint64_t started_ns;  /* when the backend first accepted it; 0: not yet */
  uint32_t resubmits;   /* completions with EINTR or EAGAIN */
  bool partial;         /* injected: its batch is cut after the first chunk */
  tm_chunk *next_free;
};

struct tm_queue {
  const tm_backend *backend;
  void *state;
  tm_queue_options options;
  tm_fault_point *faults;
  tm_counters counters;
  tm_histogram latency[TM_NUM_OPS];
  pthread_t thread;
  bool joined;

  pthread_mutex_t mutex;
  tm_list incoming;
  bool closing;
  bool cancelling; /* the thread is to end what it has not begun, and `doomed` */
  tm_list doomed;  /* what was incoming then; what comes later is not cancelled */

  /* Of the thread. */
  tm_list lists[TM_NUM_PRIORITIES][TM_NUM_OPS];
  tm_chunk *chunks;
  tm_chunk *free_chunks;
  uint32_t depth[TM_NUM_OPS], taken[TM_NUM_OPS]; /* taken: cut and not settled */
  uint32_t in_kernel;
  tm_chunk **ready; /* cut or to be continued, not yet accepted by the backend */
  const tm_transfer **batch;
  uint32_t num_ready;
  uint32_t backoff; /* refused submissions in a row with nothing in flight */
  tm_completion *completions;
  uint64_t reaped_ns; /* when the completions being handled were fetched */
};

static void count(_Atomic uint64_t *counter, uint64_t by) {
  atomic_fetch_add_explicit(counter, by, memory_order_relaxed);
}

static uint64_t peek(_Atomic uint64_t *counter) {
  return atomic_load_explicit(counter, memory_order_relaxed);
}

void tm_counters_add(tm_counters *counters, tm_engine_stats *total) {
  uint64_t highest = peek(&counters->max_in_flight);
  total->read_bytes += peek(&counters->bytes[TM_OP_READ]);
  total->written_bytes += peek(&counters->bytes[TM_OP_WRITE]);
  total->copied_bytes += peek(&counters->copied_bytes);
  total->read_chunks += peek(&counters->chunks[TM_OP_READ]);
  total->written_chunks += peek(&counters->chunks[TM_OP_WRITE]);
  total->submit_calls += peek(&counters->submit_calls);
  total->retries += peek(&counters->retries);
  if (highest > total->max_in_flight) total->max_in_flight = highest;
}

/* ---- chunks ------------------------------------------------------------------------------ */

static tm_list *list_of(tm_queue *queue, const tm_request *request) {
  return &queue->lists[request->io.priority][request->io.op];
}

static tm_request *next_request(tm_queue *queue, uint32_t op) {
  tm_request *request = queue->lists[TM_PRIORITY_DEMAND][op].head;
  return request ? request : queue->lists[TM_PRIORITY_BACKGROUND][op].head;
}

/* The end of a chunk, well (status 0) or not. */
static void settle(tm_queue *queue, tm_chunk *chunk, int32_t status) {
  tm_request *request = chunk->request;
  uint32_t op = request->io.op;
  count(&queue->counters.bytes[op], chunk->moved);
  count(&queue->counters.chunks[op], 1);
  if (!status) tm_histogram_count(&queue->latency[op], queue->reaped_ns - chunk->started_ns);
  tm_request_note(request, status, chunk->at, chunk->moved);
  chunk->next_free = queue->free_chunks;
  queue->free_chunks = chunk;
  queue->taken[op]--;
  request->outstanding--;
  if (status < 0 && request->queued) {
    /* The rest is not started. A request with chunks out is always the head of its list. */
    tm_list_pop(list_of(queue, request));
    request->queued = false;
  }
  if (request->outstanding == 0 && !request->queued) tm_request_finish(request);
}

static void aim(tm_chunk *chunk, uint64_t from) {
  const tm_io *io = &chunk->request->io;
  chunk->moved = from;
  chunk->transfer.offset = io->offset + chunk->at + from;
  chunk->transfer.buffer = (char *)io->buffer + chunk->at + from;
  chunk->transfer.length = (uint32_t)(chunk->length - from);
}

/* True when an injected error settled the chunk at once. */
static bool apply_fault(tm_queue *queue, tm_chunk *chunk) {
  tm_fault fault;
  if (!tm_fault_hits(queue->faults, chunk->request->io.op, &fault)) return false;
  switch (fault.kind) {
    case TM_FAULT_ERROR:
      settle(queue, chunk, -fault.error);
      return true;
    case TM_FAULT_SHORT:
      chunk->shorten_to = chunk->length / 2;
      if (chunk->shorten_to >= TM_BLOCK) {
        chunk->shorten_to -= chunk->shorten_to % TM_BLOCK;
        chunk->transfer.length = (uint32_t)chunk->shorten_to;
      }
      break;
    case TM_FAULT_SUBMIT_ERROR:
      chunk->submit_errors = fault.repeat;
      chunk->submit_errno = fault.error;
      break;
    default:
      chunk->partial = true;
  }
  return false;
}

static void cut_chunk(tm_queue *queue, tm_request *request) {
  uint64_t left = request->io.length - request->issued;
  tm_chunk *chunk = queue->free_chunks;
  queue->free_chunks = chunk->next_free;
  uint32_t slot = chunk->transfer.slot;
  memset(chunk, 0, sizeof *chunk);
  chunk->request = request;
  chunk->at = request->issued;
  chunk->length = left < queue->options.chunk_bytes ? left : queue->options.chunk_bytes;
  chunk->last_end = UINT64_MAX;
  chunk->transfer.slot = slot;
  chunk->transfer.op = request->io.op;
  chunk->transfer.fd = request->io.fd;
  aim(chunk, 0);
  queue->taken[request->io.op]++;
  request->outstanding++;
  request->issued += chunk->length;
  if (request->issued == request->io.length) {
    tm_list_pop(list_of(queue, request));
    request->queued = false;
  }
  if (!apply_fault(queue, chunk)) queue->ready[queue->num_ready++] = chunk;
}

static void cut_chunks(tm_queue *queue) {
  for (uint32_t op = 0; op < TM_NUM_OPS; op++) {
    tm_request *request;
    while (queue->taken[op] < queue->depth[op] && (request = next_request(queue, op)))
      cut_chunk(queue, request);
  }
}

/* A transfer that ended early. [Note: short transfers] Buffered files continue where it stopped.
 * With O_DIRECT a stop inside a block continues at the start of that block, since neither memory
 * nor offset may be unaligned. A transfer that stops where the last one did makes no progress:
 * the end of the file for a read. */
static void continue_chunk(tm_queue *queue, tm_chunk *chunk, uint64_t end) {
  if (end == chunk->last_end || end == chunk->moved) {
    chunk->moved = end;
    settle(queue, chunk, chunk->request->io.op == TM_OP_READ ? -ENODATA : -EIO);
    return;
  }
  chunk->last_end = end;
  uint64_t from = end;
  if (end % TM_BLOCK && fcntl(chunk->transfer.fd, F_GETFL) & O_DIRECT) from -= end % TM_BLOCK;
  aim(chunk, from);
  count(&queue->counters.retries, 1);
  queue->ready[queue->num_ready++] = chunk;
}

static void complete(tm_queue *queue, tm_chunk *chunk, int64_t result) {
  if ((result == -EINTR || result == -EAGAIN) && chunk->resubmits++ < MAX_RESUBMITS) {
    count(&queue->counters.retries, 1);
    queue->ready[queue->num_ready++] = chunk;
    return;
  }
  if (result < 0) {
    settle(queue, chunk, (int32_t)result);
    return;
  }
  if (chunk->shorten_to) {
    if ((uint64_t)result > chunk->shorten_to) result = (int64_t)chunk->shorten_to;
    chunk->shorten_to = 0;
  }
  uint64_t end = chunk->moved + (uint64_t)result;
  if (end < chunk->length) {
    continue_chunk(queue, chunk, end);
  } else {
    chunk->moved = chunk->length;
    settle(queue, chunk, 0);
  }
}

/* ---- submission -------------------------------------------------------------------------- */

static void note_start(tm_queue *queue, uint32_t num, uint64_t now) {
  for (uint32_t i = 0; i < num; i++)
    if (!queue->ready[i]->started_ns) queue->ready[i]->started_ns = now;
}

static void drop_ready(tm_queue *queue, uint32_t num) {
  queue->num_ready -= num;
  memmove(queue->ready, queue->ready + num, queue->num_ready * sizeof *queue->ready);
}

/* One call of the backend, or an injected refusal. What remains at the head of ready comes next. */
static int submit_once(tm_queue *queue, uint32_t *asked) {
  tm_chunk *first = queue->ready[0];
  uint32_t num = 0;
  bool cut = false;
  *asked = 1;
  count(&queue->counters.submit_calls, 1);
  if (first->submit_errors) {
    first->submit_errors--;
    return -first->submit_errno;
  }
  while (num < queue->num_ready && !queue->ready[num]->submit_errors) {
    cut |= queue->ready[num]->partial;
    queue->ready[num]->partial = false;
    queue->batch[num] = &queue->ready[num]->transfer;
    num++;
  }
  *asked = num;
  return queue->backend->submit(queue->state, queue->batch, cut ? 1 : num);
}

/* True to try again at once. */
static bool back_off(tm_queue *queue) {
  if (queue->in_kernel) return false; /* a completion frees what was lacking */
  if (queue->backoff == BACKOFF_TRIES) {
    tm_chunk *first = queue->ready[0];
    drop_ready(queue, 1);
    settle(queue, first, -EAGAIN);
    queue->backoff = 0;
    return true;
  }
  uint32_t doublings = queue->backoff < BACKOFF_DOUBLINGS ? queue->backoff : BACKOFF_DOUBLINGS;
  struct timespec pause = {0, (long)BACKOFF_FIRST_NS << doublings};
  queue->backoff++;
  nanosleep(&pause, NULL);
  return true;
}

static void submit_ready(tm_queue *queue) {
  bool again = true;
  while (again && queue->num_ready) {
    uint32_t asked;
    uint64_t now = tm_now_ns();
    int accepted = submit_once(queue, &asked);
    if (accepted > 0) {
      note_start(queue, (uint32_t)accepted, now);
      drop_ready(queue, (uint32_t)accepted);
      queue->in_kernel += (uint32_t)accepted;
      queue->backoff = 0;
      if ((uint32_t)accepted < asked) count(&queue->counters.retries, 1);
      if (queue->in_kernel > peek(&queue->counters.max_in_flight))
        atomic_store_explicit(&queue->counters.max_in_flight, queue->in_kernel,
                              memory_order_relaxed);
    } else if (accepted == -EINTR) {
      count(&queue->counters.retries, 1);
    } else if (accepted == -EAGAIN || accepted == 0) {
      count(&queue->counters.retries, 1);
      again = back_off(queue);
    } else { /* about the first chunk only: a bad descriptor, say */
      tm_chunk *first = queue->ready[0];
      drop_ready(queue, 1);
      settle(queue, first, accepted);
    }
  }
}

/* ---- the thread -------------------------------------------------------------------------- */

static void cancel_list(tm_list *list) {
  tm_request *request;
  while ((request = tm_list_pop(list))) {
    request->queued = false;
    tm_request_note(request, -ECANCELED, request->issued, 0);
    if (request->outstanding == 0) tm_request_finish(request); /* else its last chunk does */
  }
}

static void cancel_waiting(tm_queue *queue) {
  for (uint32_t priority = 0; priority < TM_NUM_PRIORITIES; priority++)
    for (uint32_t op = 0; op < TM_NUM_OPS; op++) cancel_list(&queue->lists[priority][op]);
}

static bool take_incoming(tm_queue *queue) {
  pthread_mutex_lock(&queue->mutex);
  tm_request *request = queue->incoming.head;
  bool closing = queue->closing;
  bool cancelling = queue->cancelling;
  tm_list doomed = queue->doomed;
  queue->incoming = queue->doomed = (tm_list){NULL, NULL};
  queue->cancelling = false;
  pthread_mutex_unlock(&queue->mutex);
  if (cancelling) cancel_waiting(queue);
  cancel_list(&doomed);
  while (request) {
    tm_request *next = request->next;
    tm_list_push(list_of(queue, request), request);
    request = next;
  }
  return closing;
}

static bool is_idle(tm_queue *queue) {
  return !queue->taken[TM_OP_READ] && !queue->taken[TM_OP_WRITE] &&
         !next_request(queue, TM_OP_READ) && !next_request(queue, TM_OP_WRITE);
}

static void *queue_main(void *argument) {
  tm_queue *queue = argument;
  uint32_t depth = queue->depth[TM_OP_READ] + queue->depth[TM_OP_WRITE];
  for (;;) {
    bool closing = take_incoming(queue);
    cut_chunks(queue);
    submit_ready(queue);
    if (is_idle(queue)) {
      if (closing) break;
    } else if (!queue->in_kernel) {
      continue; /* injected or refused chunks were settled; more are to be cut */
    }
    int num = queue->backend->reap(queue->state, queue->completions, depth);
    queue->reaped_ns = tm_now_ns();
    for (int i = 0; i < num; i++) {
      queue->in_kernel--;
      complete(queue, &queue->chunks[queue->completions[i].slot], queue->completions[i].result);
    }
  }
  return NULL;
}

int tm_thread_start(pthread_t *thread, const char *name, void *(*entry)(void *), void *argument) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int rc = -pthread_create(thread, NULL, entry, argument);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (!rc) pthread_setname_np(*thread, name);
  return rc;
}

/* ---- life cycle -------------------------------------------------------------------------- */

static bool are_valid(const tm_queue_options *options) {
  return options->chunk_bytes && options->chunk_bytes % TM_BLOCK == 0 &&
         options->chunk_bytes <= TM_MAX_CHUNK_BYTES && options->read_depth &&
         options->write_depth && options->read_depth <= TM_MAX_DEPTH &&
         options->write_depth <= TM_MAX_DEPTH;
}

static void release(tm_queue *queue) {
  free(queue->chunks);
  free(queue->ready);
  free(queue->batch);
  free(queue->completions);
  free(queue);
}

int tm_queue_create(const tm_backend *backend, const tm_queue_options *options,
                    tm_fault_point *faults, tm_queue **out) {
  int rc = -EINVAL;
  tm_queue *queue = NULL;
  if (!are_valid(options)) goto out;
  rc = -ENOMEM;
  queue = calloc(1, sizeof *queue);
  if (!queue) goto out;
  uint32_t depth = options->read_depth + options->write_depth;
  queue->backend = backend;
  queue->options = *options;
  queue->faults = faults;
  queue->depth[TM_OP_READ] = options->read_depth;
  queue->depth[TM_OP_WRITE] = options->write_depth;
  queue->chunks = calloc(depth, sizeof *queue->chunks);
  queue->ready = calloc(depth, sizeof *queue->ready);
  queue->batch = calloc(depth, sizeof *queue->batch);
  queue->completions = calloc(depth, sizeof *queue->completions);
  if (!queue->chunks || !queue->ready || !queue->batch || !queue->completions) goto out;
  for (uint32_t i = depth; i-- > 0;) {
    queue->chunks[i].transfer.slot = i;
    queue->chunks[i].next_free = queue->free_chunks;
    queue->free_chunks = &queue->chunks[i];
  }
  rc = backend->setup(depth, &queue->state);
  if (rc) goto out;
  pthread_mutex_init(&queue->mutex, NULL);
  rc = tm_thread_start(&queue->thread, "tm-io", queue_main, queue);
  if (rc) {
    pthread_mutex_destroy(&queue->mutex);
    backend->teardown(queue->state);
  }
out:
  if (rc && queue) release(queue);
  if (!rc) *out = queue;
  return rc;
}

int tm_queue_push(tm_queue *queue, tm_list requests) {
  for (tm_request *request = requests.head; request; request = request->next)
    request->queued = true; /* nobody else sees them yet */
  pthread_mutex_lock(&queue->mutex);
  bool closing = queue->closing;
  bool was_empty = !queue->incoming.head;
  if (!closing) {
    tm_list_append(&queue->incoming, requests);
    /* The thread takes the whole list at once, so only the first of several must wake it. Under
     * the mutex, because close tears the backend down once no push can be here any more. */
    if (was_empty) queue->backend->wake(queue->state);
  }
  pthread_mutex_unlock(&queue->mutex);
  return closing ? -ESHUTDOWN : 0;
}

void tm_queue_cancel(tm_queue *queue) {
  pthread_mutex_lock(&queue->mutex);
  queue->cancelling = true;
  tm_list_append(&queue->doomed, queue->incoming);
  queue->incoming = (tm_list){NULL, NULL};
  queue->backend->wake(queue->state);
  pthread_mutex_unlock(&queue->mutex);
}

/* The caller serialises calls of close, and those with calls of cancel. */
void tm_queue_close(tm_queue *queue) {
  if (queue->joined) return;
  pthread_mutex_lock(&queue->mutex);
  queue->closing = true;
  pthread_mutex_unlock(&queue->mutex);
  queue->backend->wake(queue->state);
  pthread_join(queue->thread, NULL);
  queue->backend->teardown(queue->state);
  queue->joined = true;
}

void tm_queue_free(tm_queue *queue) {
  pthread_mutex_destroy(&queue->mutex);
  release(queue);
}

void tm_queue_abandon(tm_queue *queue) {
  if (!queue->joined) queue->backend->abandon(queue->state);
  release(queue);
}

tm_counters *tm_queue_counters(tm_queue *queue) { return &queue->counters; }

const tm_histogram *tm_queue_latency(tm_queue *queue, uint32_t op) { return &queue->latency[op]; }

void *tm_queue_backend_state(tm_queue *queue) { return queue->state; }
