/* engine_chunk.c: the chunks of a queue, from cutting to settling: depth limits, retries, faults.
 *
 * [Note: order] Requests of one operation and priority start in the order of submission. Chunks of
 * several requests are in flight at once; nothing waits for a request to end before the next one
 * starts, so the drive never runs dry between tensors.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <time.h>

#include "engine_queue.h"

/* About a second in all. */
enum { BACKOFF_TRIES = 30, BACKOFF_DOUBLINGS = 10, BACKOFF_FIRST_NS = 50000 };
enum { MAX_RESUBMITS = 100 };

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
  chunk->request = NULL;
  queue->taken[op]--;
  request->outstanding--;
  if (status < 0 && request->queued) {
    /* The rest is not started. A request with chunks out is always the head of its list. */
    tm_list_pop(tm_queue_list_of(queue, request));
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
    case TM_FAULT_REAP_ERROR:
      queue->reap_error = -fault.error;
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
    tm_list_pop(tm_queue_list_of(queue, request));
    request->queued = false;
  }
  if (!apply_fault(queue, chunk)) queue->ready[queue->num_ready++] = chunk;
}

void tm_queue_cut_chunks(tm_queue *queue) {
  for (uint32_t op = 0; op < TM_NUM_OPS; op++) {
    tm_request *request;
    while (queue->taken[op] < queue->depth[op] && (request = tm_queue_next_request(queue, op)))
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

void tm_queue_complete(tm_queue *queue, uint32_t num) {
  queue->in_kernel -= num;
  for (uint32_t i = 0; i < num; i++)
    complete(queue, &queue->chunks[queue->completions[i].slot], queue->completions[i].result);
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

void tm_queue_submit_ready(tm_queue *queue) {
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


/* ---- when the backend has failed --------------------------------------------------------- */

void tm_queue_fail_chunks(tm_queue *queue, int32_t status) {
  static const struct timespec pause = {0, 1000000};
  while (queue->num_ready) {
    tm_chunk *first = queue->ready[0];
    drop_ready(queue, 1);
    settle(queue, first, status);
  }
  while (queue->backend->num_ended(queue->state) < queue->in_kernel) nanosleep(&pause, NULL);
  queue->in_kernel = 0;
  uint32_t depth = queue->depth[TM_OP_READ] + queue->depth[TM_OP_WRITE];
  for (uint32_t i = 0; i < depth; i++)
    if (queue->chunks[i].request) settle(queue, &queue->chunks[i], status);
}
