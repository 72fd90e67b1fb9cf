// What every step computes, on a CPU and on a GPU: one new token of each sequence attends to the
// keys and values of its sequence.
//
//   S = scale * Q K^T      P = softmax(S)      O = P V
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

template <typename T>
struct Attention {
  const T* query;           // [num_seqs][num_heads][head_size]
  const T* key;             // contiguous: [num_seqs][num_kv_heads][max_len][head_size]
  const T* value;           // paged: [num_pages][num_kv_heads][page_size][head_size] (layout HND)
  T* out;                   // [num_seqs][num_heads][head_size]
  const int32_t* seq_lens;  // [num_seqs], 0 to max_len
  const int32_t* block_table;  // [num_seqs][table_width]; contiguous: unused
  float* scratch;              // step 1: S and P; steps 5 to 7: results of splits
  int32_t num_seqs;
  int32_t num_heads;     // of the query; a multiple of num_kv_heads
  int32_t num_kv_heads;  // num_heads / num_kv_heads query heads share a KV head
  int32_t head_size;
  int32_t max_len;      // tokens; contiguous: the memory of a sequence
  int32_t page_size;    // tokens
  int32_t table_width;  // pages
  int32_t num_splits;   // of a sequence, from step 5 on
  float scale;          // 1 / sqrt(head_size)
};

// Offset of a query head's first element, in the query and in the output.
template <typename T>
HOST_DEVICE inline int64_t query_row(const Attention<T>& a, int seq, int head) {
  return (int64_t{seq} * a.num_heads + head) * a.head_size;
}

// Offset of a token's first element, in contiguous keys and values.
template <typename T>
HOST_DEVICE inline int64_t contiguous_row(const Attention<T>& a, int seq, int kv_head, int token) {
  return ((int64_t{seq} * a.num_kv_heads + kv_head) * a.max_len + token) * a.head_size;
}

// The same in pages: the table says which page holds a token. `page_size` is a.page_size; a caller
// that knows it as a constant saves the divisions.
template <typename T>
HOST_DEVICE inline int64_t paged_row(const Attention<T>& a, int seq, int kv_head, int token,
                                     int page_size) {
  const int64_t page = a.block_table[int64_t{seq} * a.table_width + token / page_size];
  return ((page * a.num_kv_heads + kv_head) * page_size + token % page_size) * a.head_size;
}
