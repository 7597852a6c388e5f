// Streams one answer and survives lost connections, dead front ends, restarts and full queues.
//
//     stream [--ca FILE] [--key FILE] [--timeout SECONDS] [--patience SECONDS] [--max-tokens N] TARGET TEXT
//
// It follows the rules of docs/clients.md, "What to do when something breaks": wait at least as long as the server says,
// resume the stream after the tokens received, never show a token twice. README.md in the folder above says how to build it.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iostream>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>

#include <grpcpp/grpcpp.h>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "npuserve/v1/inference_service.grpc.pb.h"

namespace api = npuserve::v1;
using Clock = std::chrono::system_clock;
using Seconds = std::chrono::duration<double>;

const std::string DOMAIN_NAME = "npuserve.dev";  // ErrorInfo.domain of npuserve: a name, not an address
const Seconds MIN_BACKOFF(0.05), MAX_BACKOFF(5);

struct Options {
    std::string ca, key, target, text;
    Seconds timeout{std::numeric_limits<double>::infinity()}, patience{60};
    uint32_t max_tokens = 64;
};

std::string read_file(const std::string &path) {
    std::ifstream file(path);
    if (!file) throw std::runtime_error(path + ": cannot be read");
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

// What a call ended with. reason: the server's name of the cause; empty if a connection or a proxy broke. retry: the
// server's least time until the next call.
struct Failure {
    grpc::Status status;
    std::string reason;
    std::optional<Seconds> retry;
    google::rpc::BadRequest bad_request;

    explicit Failure(const grpc::Status &failed) : status(failed) {
        google::rpc::Status details;
        details.ParseFromString(status.error_details());
        for (const auto &detail : details.details()) {
            google::rpc::ErrorInfo info;
            google::rpc::RetryInfo wait;
            if (detail.UnpackTo(&info) && info.domain() == DOMAIN_NAME) reason = info.reason();
            if (detail.UnpackTo(&wait))
                retry = Seconds(double(wait.retry_delay().seconds()) + 1e-9 * wait.retry_delay().nanos());
            if (detail.Is<google::rpc::BadRequest>()) detail.UnpackTo(&bad_request);
        }
    }
    bool is_transient() const {
        grpc::StatusCode code = status.error_code();
        if (retry || code == grpc::UNAVAILABLE) return true;
        bool broken = code == grpc::INTERNAL || code == grpc::UNKNOWN || code == grpc::CANCELLED;
        return broken && reason.empty();
    }
};

// One answer across all its calls.
class Answer {
  public:
    Answer(api::InferenceService::Stub &stub, const Options &options) : stub(stub), options(options) {
        request.set_text(options.text);
        request.mutable_stopping()->set_max_tokens(options.max_tokens);
        if (std::isfinite(options.timeout.count()))
            deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(options.timeout);
    }

    // Shows the answer. Returns the failure that ended it, if any.
    std::optional<Failure> stream() {
        std::mt19937 generator{std::random_device{}()};
        std::uniform_real_distribution<double> random(0, 1);
        Clock::time_point failing_since;
        for (;;) {
            bool resuming = !token.empty();
            grpc::Status status = call();
            if (status.ok()) return std::nullopt;
            Failure failure(status);
            bool is_unknown = resuming && failure.reason == "STREAM_NOT_FOUND";
            if (!failure.is_transient() && !(is_unknown && !received)) return failure;
            if (received && token.empty()) return failure;
            // The server refused the request or has no such stream: the request is sent again.
            if (!received && !failure.reason.empty()) token.clear();
            Clock::time_point now = Clock::now();
            if (!failures) failing_since = now;
            Seconds nominal = std::min(MAX_BACKOFF, MIN_BACKOFF * std::pow(2.0, std::min(failures++, 16)));
            Seconds wait = std::max(nominal * (0.5 + random(generator) / 2),
                                    failure.retry.value_or(Seconds(0)) * (1 + random(generator) / 4));
            if (deadline && now + wait >= *deadline) return failure;
            if (now + wait - failing_since > options.patience) return failure;
            std::this_thread::sleep_for(wait);
        }
    }

  private:
    // Opens one stream and reads it to its end or failure.
    grpc::Status call() {
        grpc::ClientContext context;
        if (deadline) context.set_deadline(*deadline);
        if (!options.key.empty()) context.AddMetadata("authorization", "Bearer " + options.key);
        std::unique_ptr<grpc::ClientReader<api::StreamGenerateResponse>> reader;
        if (token.empty()) {
            reader = stub.StreamGenerate(&context, request);
        } else {
            api::ResumeStreamRequest resume;
            resume.set_resume_token(token);
            resume.set_token_offset(tokens);
            reader = stub.ResumeStream(&context, resume);
        }
        reader->WaitForInitialMetadata();
        const auto &metadata = context.GetServerInitialMetadata();
        if (auto found = metadata.find("x-resume-token"); found != metadata.end())
            token.assign(found->second.data(), found->second.size());
        api::StreamGenerateResponse message;
        bool finished = false;
        while (reader->Read(&message)) {
            if (message.offset() != tokens) {
                context.TryCancel();
                reader->Finish();
                return {grpc::DATA_LOSS, "a message at token " + std::to_string(message.offset()) + ", " +
                                             std::to_string(tokens) + " was next"};
            }
            tokens += message.num_tokens();
            received = true;
            if (message.num_tokens()) failures = 0;
            finished = message.has_finish();
            std::cout << message.text() << std::flush;
        }
        grpc::Status status = reader->Finish();
        if (finished) return grpc::Status::OK;  // the answer is complete
        return status.ok() ? grpc::Status(grpc::UNKNOWN, "the stream ended without a finish") : status;
    }

    api::InferenceService::Stub &stub;
    const Options &options;
    api::GenerateRequest request;
    std::optional<Clock::time_point> deadline;
    std::string token;    // resume token; empty until known
    uint32_t tokens = 0;  // received
    bool received = false;
    int failures = 0;  // in a row
};

std::shared_ptr<grpc::Channel> connect(const Options &options) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10000);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10000);
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
    arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
    auto credentials = grpc::InsecureChannelCredentials();
    if (!options.ca.empty()) credentials = grpc::SslCredentials({read_file(options.ca), "", ""});
    return grpc::CreateCustomChannel(options.target, credentials, arguments);
}

Options parse(int argc, char **argv) {
    Options options;
    int i = 1;
    for (; i + 1 < argc && !std::strncmp(argv[i], "--", 2); i += 2) {
        std::string name = argv[i], value = argv[i + 1];
        if (name == "--ca") options.ca = value;
        else if (name == "--key") options.key = read_file(value);
        else if (name == "--timeout") options.timeout = Seconds(std::stod(value));
        else if (name == "--patience") options.patience = Seconds(std::stod(value));
        else if (name == "--max-tokens") options.max_tokens = uint32_t(std::stoul(value));
        else throw std::runtime_error(name + ": no such option");
    }
    if (argc - i != 2) throw std::runtime_error("give TARGET and TEXT");
    options.target = argv[i], options.text = argv[i + 1];
    while (!options.key.empty() && std::isspace(static_cast<unsigned char>(options.key.back()))) options.key.pop_back();
    return options;
}

int main(int argc, char **argv) {
    try {
        Options options = parse(argc, argv);
        auto stub = api::InferenceService::NewStub(connect(options));
        if (auto failure = Answer(*stub, options).stream()) {
            std::cerr << "status " << failure->status.error_code() << ' ' << failure->reason << ": "
                      << failure->status.error_message() << '\n';
            for (const auto &violation : failure->bad_request.field_violations())
                std::cerr << "  " << violation.field() << ": " << violation.description() << '\n';
            return 1;
        }
        std::cout << '\n';
        return 0;
    } catch (const std::exception &error) {
        std::cerr << error.what() << '\n';
        return 1;
    }
}
