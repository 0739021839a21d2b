/* engine_latency.c: how long chunks take, in the logarithmic buckets of tiermem.h.
 *
 * A chunk costs one clock reading per submission call and per reap, which many chunks share, and two
 * relaxed additions: some tens of nanoseconds against microseconds of a transfer.
 */
#define _GNU_SOURCE
#include <time.h>

#include "engine.h"

enum { SUB_BITS = 4, SUB_BUCKETS = 1 << SUB_BITS };

uint64_t tm_now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

uint32_t tm_latency_bucket(uint64_t ns) {
  if (ns < SUB_BUCKETS) return (uint32_t)ns;
  uint32_t exponent = 63u - (uint32_t)__builtin_clzll(ns);
  uint32_t sub = (uint32_t)(ns >> (exponent - SUB_BITS)) & (SUB_BUCKETS - 1);
  uint32_t bucket = (exponent - SUB_BITS + 1) * SUB_BUCKETS + sub;
  return bucket < TM_LATENCY_BUCKETS ? bucket : TM_LATENCY_BUCKETS - 1;
}

void tm_histogram_count(tm_histogram *histogram, uint64_t ns) {
  atomic_fetch_add_explicit(&histogram->sum_ns, ns, memory_order_relaxed);
  atomic_fetch_add_explicit(&histogram->buckets[tm_latency_bucket(ns)], 1, memory_order_relaxed);
}

void tm_histogram_read(const tm_histogram *histogram, tm_latency *out) {
  out->sum_ns = atomic_load_explicit(&histogram->sum_ns, memory_order_relaxed);
  for (uint32_t i = 0; i < TM_LATENCY_BUCKETS; i++)
    out->buckets[i] = atomic_load_explicit(&histogram->buckets[i], memory_order_relaxed);
}
