// Reads that do nothing but sum: what memory gives before anything is computed. Compiled and called
// by bench_paged_attention_cpu.py, one call a thread.

typedef long Vector __attribute__((vector_size(32)));

static long sum(Vector v) {
  return v[0] + v[1] + v[2] + v[3];
}

// `n` vectors in a row, a multiple of 4.
extern "C" long read_sum(const Vector* p, long n) {
  Vector a = {}, b = {}, c = {}, d = {};
  for (long i = 0; i < n; i += 4) {
    a += p[i];
    b += p[i + 1];
    c += p[i + 2];
    d += p[i + 3];
  }
  return sum(a + b + c + d);
}

// `rounds` times `count` pages of `bytes` bytes, a multiple of 64, in groups of `group` = 2^shift
// pages, of which `count` is a multiple. While one group is summed the next one is prefetched, a
// line of each of its pages in turn: more DRAM banks and address translations at once than page by
// page.
extern "C" long read_pages(const char* const* pages, long count, long bytes, long shift,
                           long rounds) {
  const long group = 1L << shift;
  Vector a = {}, b = {};
  for (long round = 0; round < rounds; ++round) {
    for (long first = 0; first < count; first += group) {
      const char* const* next = pages + (first + group < count ? first + group : 0);
      long line = 0;  // of the group
      for (long page = first; page < first + group; ++page) {
        for (long at = 0; at < bytes; at += 64, ++line) {
          __builtin_prefetch(next[line & (group - 1)] + (line >> shift) * 64, 0, 2);
          const Vector* p = reinterpret_cast<const Vector*>(pages[page] + at);
          a += p[0];
          b += p[1];
        }
      }
    }
  }
  return sum(a + b);
}
