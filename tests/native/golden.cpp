// Golden test: runs every kernel of every instruction set of this processor on small random shapes, and compares the
// results with plain scalar code in the other files of this folder. The bits of a row must not depend on other rows, on
// the division of a call into pieces, or on the number of threads.
//
//   golden                        a line for each set and test; exit status 1 if one fails
//   golden --expect SET[,SET]     also fails unless exactly these sets run
//
// Links the library's objects, or a built library: no Python, no torch. A built library hides the tables of its kernels;
// with one, the order of units and the list of kernels are not tested.
#include "golden.h"

#include <cstdarg>
#include <thread>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace npuserve {
extern const KernelTable *const TABLES[] __attribute__((weak));  // null in a program that links a built library
}

namespace golden {

static bool has_tables() {
    const npuserve::KernelTable *const *volatile tables = npuserve::TABLES;  // compilers take arrays for non-null
    return tables != nullptr;
}

Random random_numbers;
int isa;
std::string complaint;

void fail(const char *format, ...) {
    if (!complaint.empty()) return;
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    complaint = text;
}

// Table of the set under test.
static const npuserve::KernelTable &table() {
    auto found = npuserve::TABLES;
    while (std::strcmp((*found)->isa, npuserve_isa(isa)) != 0) found++;
    return **found;
}

bool adds_128() {
    std::string set = npuserve_isa(isa);
    return set == "avx512_bf16" || set == "avx512_vnni" || set == "avx2_vnni";
}

void set_threads(int threads) {
    static int now = 0;
    if (now != threads && npuserve_set_threads(threads, nullptr) != 0) fail("no %d threads", threads);
    now = threads;
}

Op make_op(const std::string &kernel, const std::vector<const void *> &p, const std::vector<int64_t> &n,
           const std::vector<double> &f) {
    Op op = {};
    op.kernel = npuserve_kernel(kernel.c_str());
    if (op.kernel < 0) std::printf("no kernel %s\n", kernel.c_str()), std::exit(2);
    for (size_t i = 0; i < p.size(); i++) op.p[i] = p[i];
    for (size_t i = 0; i < n.size(); i++) op.n[i] = n[i];
    for (size_t i = 0; i < f.size(); i++) op.f[i] = f[i];
    return op;
}

void run(const std::vector<Op> &ops) {
    if (npuserve_run(isa, ops.data(), int64_t(ops.size()), -1, nullptr) != 0) fail("no memory");
}

char *Memory::add(int64_t bytes, int64_t row_bytes, bool written) {
    int64_t whole = (bytes + GUARD + 63) / 64 * 64;
    char *data = static_cast<char *>(std::aligned_alloc(64, size_t(whole)));
    std::memset(data, 0xA5, size_t(whole));
    pieces_.push_back({data, bytes, row_bytes, written, {}, {}});
    return data;
}
void Memory::keep() {
    for (Piece &piece : pieces_) piece.before.assign(piece.data, piece.data + piece.bytes + GUARD);
}
void Memory::restore() {
    for (Piece &piece : pieces_) std::memcpy(piece.data, piece.before.data(), piece.before.size());
}
void Memory::expect() {
    for (Piece &piece : pieces_)
        if (piece.written) piece.expected.assign(piece.data, piece.data + piece.bytes);
}
void Memory::compare(const char *run) {
    for (Piece &piece : pieces_) {
        for (int64_t i = 0; i < GUARD; i++)
            if (piece.data[piece.bytes + i] != char(0xA5)) return fail("%s: written %lld bytes past the end", run, (long long)i + 1);
        if (!piece.written) continue;
        for (int64_t i = 0; i < piece.bytes; i++)
            if (piece.data[i] != piece.expected[size_t(i)]) return fail("%s: byte %lld differs", run, (long long)i);
    }
}
int64_t Memory::row_bytes(const void *of) const {
    for (const Piece &piece : pieces_)
        if (piece.data == of) return piece.row_bytes;
    return 0;
}

void Program::add(const std::string &kernel, const std::vector<const void *> &p, const std::vector<int64_t> &n,
                  const std::vector<double> &f) {
    ops_.push_back(make_op(kernel, p, n, f));
}
void Program::run(int64_t first, int64_t end) {
    std::vector<Op> ops = ops_;
    for (Op &op : ops) {
        op.n[0] = end - first;
        for (const void *&p : op.p)
            if (p) p = static_cast<const char *>(p) + first * row_bytes(p);
    }
    golden::run(ops);
}
void Program::run() {
    keep();
    set_threads(1);
    run(0, rows_);
    expect();
    compare("all rows at once");
}
void Program::pieces(const std::vector<int64_t> &sizes, int threads, const char *name) {
    restore();
    set_threads(threads);
    for (int64_t first = 0, i = 0; first < rows_; i++) {
        int64_t end = std::min(rows_, first + sizes[size_t(i) % sizes.size()]);
        run(first, end);
        first = end;
    }
    compare(name);
}
// Runs the last unit of each call, which may be smaller, and then the others, on a new thread. If a thread's scratch grew
// within a call, it would not hold what the earlier unit left there.
void Program::last_unit_first() {
    restore();
#if defined(__GLIBC__)
    mallopt(M_PERTURB, 0xFF);  // new memory is zero
#endif
    std::thread([this] {
        for (Op op : ops_) {
            op.n[0] = rows_;
            const npuserve::Kernel &kernel = table().kernel(op.kernel);
            npuserve::Call call = {op, rows_, 3};
            for (int64_t i = 0, units = kernel.units(call); i < units; i++, call.again = true)
                kernel.run(call, (units - 1 + i) % units);
        }
    }).join();
#if defined(__GLIBC__)
    mallopt(M_PERTURB, 0);
#endif
    compare("last unit first");
}
void Program::repeat() {
    if (has_tables()) last_unit_first();
    pieces({1}, 1, "row by row");
    pieces({2, 5, 1, 9, 14, 3, 66}, 1, "in pieces");
    pieces({rows_}, 3, "on three threads");
    pieces({7, 70, 1, 4}, 3, "in pieces on three threads");
}

// The tests of all files. Fails for kernels without a test, if the tables are known.
static std::vector<Test> all_tests() {
    std::vector<Test> all;
    for (const auto &tests : {product_tests(), compact_tests(), int4_tests(), nibbles_tests(), cache_tests(), row_tests(),
                              vocabulary_tests(), rank_tests(), expert_tests(), linear_attention_tests()})
        all.insert(all.end(), tests.begin(), tests.end());
    for (auto group = has_tables() ? npuserve::TABLES[0]->groups : nullptr; group && *group; group++)
        for (auto kernel = *group; kernel->name; kernel++) {
            bool found = false;
            for (const Test &test : all)
                for (const std::string &name : test.kernels) found |= name == kernel->name;
            if (!found) fail("%s has no test", kernel->name);
        }
    return all;
}

static int run_all(const std::string &expected) {
    std::vector<Test> tests = all_tests();
    std::string failed = complaint.empty() ? "" : "\n  " + complaint, sets;
    for (isa = 0; const char *set = npuserve_isa(isa); isa++) {
        sets += (isa ? "," : "") + std::string(set);
        for (const Test &test : tests) {
            complaint.clear();
            random_numbers = Random();
            test.run();
            std::string names;
            for (const std::string &name : test.kernels) names += (names.empty() ? "" : ", ") + name;
            std::printf("%-13s %-72s %s\n", set, names.c_str(), complaint.empty() ? "ok" : complaint.c_str());
            std::fflush(stdout);
            if (!complaint.empty()) failed += "\n  " + std::string(set) + " " + names;
        }
    }
    if (!expected.empty() && expected != sets) failed += "\n  the sets are " + sets + ", not " + expected;
    std::printf("%s\n", failed.empty() ? ("all passed on " + sets).c_str() : ("FAILED" + failed).c_str());
    std::fflush(stdout);
    return failed.empty() ? 0 : 1;
}

}  // namespace golden

int main(int count, char **words) {
    bool expects = count == 3 && !std::strcmp(words[1], "--expect");
    if (count != 1 && !expects) return std::fputs("golden [--expect SET[,SET]]\n", stderr), 2;
    std::_Exit(golden::run_all(expects ? words[2] : ""));  // threads of the pool may still wait
}
