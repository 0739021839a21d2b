/* Four threads on one queue, with faults, copies, a fork and a close in flight, and a queue
 * that breaks; for sanitizers.
 * usage: engine_stress BACKEND FILE (made and deleted at once). Prints ok, or "skip" where the backend
 * does not work. Half of the memory is registered, and other memory comes and goes meanwhile. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tiermem.h"

enum { PART = 4 << 20, HALF = PART / 2, PIECE = 64 << 10, NUM_READS = 6, NUM_THREADS = 4, ROUNDS = 20 };

#define CHECK(condition)                                         \
  do {                                                           \
    if (!(condition)) {                                          \
      fprintf(stderr, "%d: not %s\n", __LINE__, #condition);     \
      abort();                                                   \
    }                                                            \
  } while (0)

static tm_engine *engine;
static uint32_t queue;
static uint32_t backend;
static int fd;

static tm_request *start(uint32_t op, uint64_t offset, void *buffer, uint64_t length, int demand) {
  tm_request *request;
  tm_io io = {.op = op, .priority = demand ? TM_PRIORITY_DEMAND : TM_PRIORITY_BACKGROUND, .fd = fd,
              .offset = offset, .buffer = buffer, .length = length};
  CHECK(tm_engine_submit(engine, queue, 1, &io, &request) == 0);
  return request;
}

static void finish(tm_request *request, int slowly) {
  tm_result result;
  if (slowly) {
    while (tm_request_wait(request, 100000) == -ETIMEDOUT) {
    }
    CHECK(tm_request_result(request, &result) == 0 && result.status == 0);
  }
  tm_request_free(request);
}

static void arm(int round) {
  static const uint32_t kinds[] = {TM_FAULT_SHORT, TM_FAULT_SUBMIT_ERROR, TM_FAULT_PARTIAL_SUBMIT};
  tm_fault fault = {.op = round & 1, .kind = kinds[round % 3], .error = EAGAIN, .nth = round, .repeat = 2};
  CHECK(tm_engine_inject(engine, &fault) == 0);
}

static void *work(void *argument) {
  long number = (long)argument;
  uint64_t base = (uint64_t)number * PART;
  char *buffer;
  CHECK(posix_memalign((void **)&buffer, 4096, PART) == 0);
  int is_registered = number % 2 && backend == TM_BACKEND_IO_URING;
  for (int round = 0; round < ROUNDS; round++) {
    char value = (char)(number * ROUNDS + round);
    tm_request *reads[NUM_READS], *copy;
    tm_engine_stats stats;
    tm_latency latency;
    if (is_registered) CHECK(tm_engine_register(engine, buffer, PART) == 0);
    memset(buffer, value, HALF);
    memset(buffer + HALF, 0, HALF);
    finish(start(TM_OP_WRITE, base, buffer, HALF, round & 1), 1);
    for (int i = 0; i < NUM_READS; i++)
      reads[i] = start(TM_OP_READ, base + i * PIECE, buffer + HALF + i * PIECE, PIECE, i & 1);
    CHECK(tm_engine_copy(engine, buffer + PART - PIECE, buffer, PIECE, &copy) == 0);
    for (int i = NUM_READS; i-- > 0;) finish(reads[i], i & 1);
    finish(copy, 0);
    for (int i = 0; i < NUM_READS * PIECE; i += PIECE / 2) CHECK(buffer[HALF + i] == value);
    CHECK(buffer[PART - 1] == value);
    CHECK(tm_engine_get_stats(engine, &stats) == 0 && stats.max_in_flight <= 12);
    CHECK(tm_engine_latency(engine, queue, TM_OP_READ, &latency) == 0 && latency.sum_ns > 0);
    if (is_registered) CHECK(tm_engine_unregister(engine, buffer) == 0);
    arm(round);
  }
  free(buffer);
  return NULL;
}

/* Each ends whole, or cancelled with what it had moved; what is submitted afterwards is not cancelled. */
static void cancel_some(char *buffer) {
  tm_request *requests[HALF / PIECE];
  tm_io ios[HALF / PIECE];
  tm_result result;
  for (int i = 0; i < HALF / PIECE; i++)
    ios[i] = (tm_io){.op = TM_OP_READ, .priority = i & 1, .fd = fd, .offset = i * PIECE,
                     .buffer = buffer + i * PIECE, .length = PIECE};
  ios[HALF / PIECE - 1].op = 2; /* one that cannot be: none is started */
  CHECK(tm_engine_submit(engine, queue, HALF / PIECE, ios, requests) == -EINVAL);
  ios[HALF / PIECE - 1].op = TM_OP_READ;
  CHECK(tm_engine_submit(engine, queue, HALF / PIECE, ios, requests) == 0);
  CHECK(tm_engine_cancel(engine, queue) == 0);
  for (int i = 0; i < HALF / PIECE; i++) {
    CHECK(tm_request_wait(requests[i], -1) == 0 && tm_request_result(requests[i], &result) == 0);
    CHECK(result.transferred == (result.status ? 0 : PIECE));
    CHECK(result.status == 0 || result.status == -ECANCELED);
    tm_request_free(requests[i]);
  }
  finish(start(TM_OP_READ, 0, buffer, HALF, 0), 1);
  CHECK(tm_engine_cancel(engine, queue + 1) == -EINVAL);
}

/* A queue that can no longer collect: four threads submit to it until it refuses, and all hear of it.
 * The memory is used again at once, which the thread sanitizer and the values would tell. */
static void *submit_until_refused(void *argument) {
  char *buffer = argument;
  uint32_t broken = queue + 1;
  memset(buffer, 0x5a, HALF / 4);
  for (int i = 0, rc = 0; rc == 0; i++) {
    tm_request *request;
    tm_result result;
    tm_io io = {.op = TM_OP_READ, .priority = i & 1, .fd = fd, .buffer = buffer, .length = HALF / 4};
    rc = tm_engine_submit(engine, broken, 1, &io, &request);
    CHECK(rc == 0 || rc == -EPERM);
    if (rc) break;
    CHECK(tm_request_wait(request, -1) == 0 && tm_request_result(request, &result) == 0);
    CHECK(result.status == 0 || result.status == -EPERM);
    memset(buffer, 0x5a, HALF / 4);
    tm_request_free(request);
  }
  for (int i = 0; i < HALF / 4; i += PIECE / 4) CHECK(buffer[i] == 0x5a);
  return NULL;
}

static void break_queue(char *buffer) {
  tm_queue_options options = {.chunk_bytes = PIECE, .read_depth = 8, .write_depth = 4};
  tm_fault fault = {.op = TM_OP_READ, .kind = TM_FAULT_REAP_ERROR, .error = EPERM, .nth = 100, .repeat = 1};
  pthread_t threads[NUM_THREADS];
  uint32_t broken;
  CHECK(tm_engine_add_queue(engine, &options, &broken) == 0 && broken == queue + 1);
  CHECK(tm_engine_inject(engine, &fault) == 0);
  for (int i = 0; i < NUM_THREADS; i++)
    CHECK(pthread_create(&threads[i], NULL, submit_until_refused, buffer + i * HALF / 4) == 0);
  for (int i = 0; i < NUM_THREADS; i++) pthread_join(threads[i], NULL);
  CHECK(tm_engine_cancel(engine, broken) == 0);
}

/* In the child nothing may hang. */
static void fork_with(tm_request *in_flight) {
  int status;
  pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    tm_request *request;
    tm_io io = {.op = TM_OP_READ, .fd = fd};
    int rc = tm_request_wait(in_flight, -1);
    if (rc != 0 && rc != -ECHILD) _exit(1);
    if (tm_engine_submit(engine, queue, 1, &io, &request) != -ECHILD) _exit(2);
    if (tm_engine_close(engine) != -ECHILD) _exit(3);
    tm_request_free(in_flight);
    tm_engine_free(engine);
    _exit(0);
  }
  CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

static void run(void) {
  tm_queue_options options = {.chunk_bytes = PIECE, .read_depth = 8, .write_depth = 4};
  pthread_t threads[NUM_THREADS];
  tm_result result;
  char *buffer;
  CHECK(tm_engine_create(backend, &engine) == 0);
  CHECK(tm_engine_add_queue(engine, &options, &queue) == 0);
  for (long i = 0; i < NUM_THREADS; i++) CHECK(pthread_create(&threads[i], NULL, work, (void *)i) == 0);
  for (int i = 0; i < NUM_THREADS; i++) pthread_join(threads[i], NULL);
  CHECK(posix_memalign((void **)&buffer, 4096, HALF) == 0);
  cancel_some(buffer);
  break_queue(buffer);
  tm_request *request = start(TM_OP_READ, 0, buffer, HALF, 0);
  fork_with(request);
  CHECK(tm_engine_close(engine) == 0);
  tm_engine_free(engine);
  CHECK(tm_request_result(request, &result) == 0 && result.status == 0 && result.transferred == HALF);
  tm_request_free(request); /* after its engine: allowed */
  free(buffer);
}

int main(int argc, char **argv) {
  CHECK(argc == 3);
  backend = (uint32_t)atoi(argv[1]);
  fd = open(argv[2], O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  CHECK(fd >= 0);
  unlink(argv[2]);
  if (tm_engine_create(backend, &engine)) {
    puts("skip");
    return 0;
  }
  tm_engine_free(engine);
  for (int i = 0; i < 2; i++) run();
  close(fd);
  puts("ok");
  return 0;
}
