import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import dev.npuserve.v1.GenerateRequest;
import dev.npuserve.v1.InferenceServiceGrpc;
import dev.npuserve.v1.InferenceServiceGrpc.InferenceServiceBlockingStub;
import dev.npuserve.v1.ResumeStreamRequest;
import dev.npuserve.v1.StoppingParams;
import dev.npuserve.v1.StreamGenerateResponse;
import io.grpc.Context;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.MetadataUtils;
import java.io.File;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Iterator;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;
import java.util.function.Consumer;

/**
 * Streams one answer and survives lost connections, dead front ends, restarts and full queues.
 *
 * <pre>Stream [--ca FILE] [--key FILE] [--timeout SECONDS] [--patience SECONDS] [--max-tokens N] TARGET TEXT</pre>
 *
 * It follows the rules of docs/clients.md, "What to do when something breaks": wait at least as long as the server says,
 * resume the stream after the tokens received, never show a token twice. README.md in the folder above says how to build it.
 */
public final class Stream {
    private static final String DOMAIN = "npuserve.dev"; // ErrorInfo.domain of npuserve: a name, not an address
    private static final double MIN_BACKOFF = 0.05, MAX_BACKOFF = 5; // seconds
    private static final Metadata.Key<String> RESUME_TOKEN =
            Metadata.Key.of("x-resume-token", Metadata.ASCII_STRING_MARSHALLER);
    private static final Metadata.Key<String> AUTHORIZATION =
            Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);

    /**
     * What a call ended with. reason: the server's name of the cause; empty if a connection or a proxy broke. retry: the
     * server's least seconds until the next call; negative if it gave none.
     */
    private record Failure(Status.Code code, String reason, double retry) {
        static Failure of(StatusRuntimeException error) {
            String reason = "";
            double retry = -1;
            com.google.rpc.Status details = StatusProto.fromThrowable(error);
            for (com.google.protobuf.Any detail : details.getDetailsList()) {
                try {
                    if (detail.is(ErrorInfo.class)) {
                        ErrorInfo info = detail.unpack(ErrorInfo.class);
                        reason = info.getDomain().equals(DOMAIN) ? info.getReason() : "";
                    } else if (detail.is(RetryInfo.class)) {
                        com.google.protobuf.Duration delay = detail.unpack(RetryInfo.class).getRetryDelay();
                        retry = delay.getSeconds() + 1e-9 * delay.getNanos();
                    }
                } catch (InvalidProtocolBufferException broken) {
                    throw new IllegalStateException("a detail of an error cannot be read", broken);
                }
            }
            return new Failure(error.getStatus().getCode(), reason, retry);
        }

        boolean isTransient() {
            if (retry >= 0 || code == Status.Code.UNAVAILABLE) return true;
            boolean broken =
                    code == Status.Code.INTERNAL || code == Status.Code.UNKNOWN || code == Status.Code.CANCELLED;
            return broken && reason.isEmpty();
        }
    }

    private final InferenceServiceBlockingStub stub;
    private final GenerateRequest request;
    private final Consumer<StreamGenerateResponse> show;
    private final long deadline; // of System.nanoTime; Long.MAX_VALUE: none
    private final double patience;
    private String token = ""; // resume token; empty until known
    private int tokens; // received
    private boolean received;
    private int failures; // in a row

    /**
     * @param timeout seconds for the whole answer; infinite: no limit
     * @param patience seconds of failures in a row
     */
    Stream(InferenceServiceBlockingStub stub, GenerateRequest request, double timeout, double patience,
            Consumer<StreamGenerateResponse> show) {
        this.stub = stub;
        this.request = request;
        this.patience = patience;
        this.show = show;
        deadline = Double.isInfinite(timeout) ? Long.MAX_VALUE : System.nanoTime() + (long) (1e9 * timeout);
    }

    /** Calls until the answer is complete. */
    void run() throws InterruptedException {
        long failingSince = 0;
        for (;;) {
            boolean resuming = !token.isEmpty();
            StatusRuntimeException error;
            try {
                call();
                return;
            } catch (StatusRuntimeException failed) {
                error = failed;
            }
            Failure failure = Failure.of(error);
            boolean isUnknown = resuming && failure.reason.equals("STREAM_NOT_FOUND");
            if (!failure.isTransient() && !(isUnknown && !received)) throw error;
            if (received && token.isEmpty()) throw error;
            // The server refused the request or has no such stream: the request is sent again.
            if (!received && !failure.reason.isEmpty()) token = "";
            long now = System.nanoTime();
            if (failures == 0) failingSince = now;
            ThreadLocalRandom random = ThreadLocalRandom.current();
            double nominal = Math.min(MAX_BACKOFF, MIN_BACKOFF * Math.pow(2, Math.min(failures++, 16)));
            double wait = Math.max(nominal * random.nextDouble(0.5, 1), failure.retry * random.nextDouble(1, 1.25));
            if (1e-9 * (now - failingSince) + wait > patience) throw error;
            if (deadline != Long.MAX_VALUE && 1e9 * wait >= deadline - now) throw error;
            TimeUnit.NANOSECONDS.sleep((long) (1e9 * wait));
        }
    }

    /** Opens one stream and reads it to its end or failure. */
    private void call() {
        AtomicReference<Metadata> headers = new AtomicReference<>(), trailers = new AtomicReference<>();
        InferenceServiceBlockingStub call =
                stub.withInterceptors(MetadataUtils.newCaptureMetadataInterceptor(headers, trailers));
        if (deadline != Long.MAX_VALUE)
            call = call.withDeadlineAfter(deadline - System.nanoTime(), TimeUnit.NANOSECONDS);
        boolean finished = false;
        // A call that is left before its end must be cancelled: its messages would pile up.
        Context.CancellableContext context = Context.current().withCancellation();
        Context previous = context.attach();
        try {
            Iterator<StreamGenerateResponse> messages = token.isEmpty()
                    ? call.streamGenerate(request)
                    : call.resumeStream(ResumeStreamRequest.newBuilder()
                            .setResumeToken(token).setTokenOffset(tokens).build());
            while (messages.hasNext()) {
                keepToken(headers.get());
                StreamGenerateResponse message = messages.next();
                if (message.getOffset() != tokens)
                    throw Status.DATA_LOSS.withDescription(
                            "a message at token " + message.getOffset() + ", " + tokens + " was next").asRuntimeException();
                tokens += message.getNumTokens();
                received = true;
                if (message.getNumTokens() > 0) failures = 0;
                finished = message.hasFinish();
                show.accept(message);
            }
        } catch (StatusRuntimeException error) {
            keepToken(headers.get());
            if (!finished) throw error;
        } finally {
            context.detach(previous);
            context.cancel(null);
        }
        if (!finished)
            throw Status.UNKNOWN.withDescription("the stream ended without a finish").asRuntimeException();
    }

    private void keepToken(Metadata headers) {
        String found = headers == null ? null : headers.get(RESUME_TOKEN);
        if (found != null) token = found;
    }

    public static void main(String[] args) throws IOException, InterruptedException {
        String ca = null, key = null;
        double timeout = Double.POSITIVE_INFINITY, patience = 60;
        int maxTokens = 64, i = 0;
        for (; i + 1 < args.length && args[i].startsWith("--"); i += 2) {
            String value = args[i + 1];
            switch (args[i]) {
                case "--ca" -> ca = value;
                case "--key" -> key = Files.readString(Path.of(value)).strip();
                case "--timeout" -> timeout = Double.parseDouble(value);
                case "--patience" -> patience = Double.parseDouble(value);
                case "--max-tokens" -> maxTokens = Integer.parseUnsignedInt(value);
                default -> throw new IllegalArgumentException(args[i] + ": no such option");
            }
        }
        if (args.length - i != 2) throw new IllegalArgumentException("give TARGET and TEXT");

        ManagedChannel channel = Grpc
                .newChannelBuilder(args[i], ca == null
                        ? InsecureChannelCredentials.create()
                        : TlsChannelCredentials.newBuilder().trustManager(new File(ca)).build())
                .keepAliveTime(10, TimeUnit.SECONDS).keepAliveTimeout(10, TimeUnit.SECONDS)
                .disableRetry().build();
        InferenceServiceBlockingStub stub = InferenceServiceGrpc.newBlockingStub(channel);
        if (key != null) {
            Metadata headers = new Metadata();
            headers.put(AUTHORIZATION, "Bearer " + key);
            stub = stub.withInterceptors(MetadataUtils.newAttachHeadersInterceptor(headers));
        }
        GenerateRequest request = GenerateRequest.newBuilder().setText(args[i + 1])
                .setStopping(StoppingParams.newBuilder().setMaxTokens(maxTokens)).build();
        try {
            new Stream(stub, request, timeout, patience, message -> {
                System.out.print(message.getText());
                System.out.flush();
            }).run();
            System.out.println();
        } catch (StatusRuntimeException error) {
            System.err.println(describe(error));
            System.exit(1);
        } finally {
            channel.shutdownNow();
        }
    }

    /** Says what went wrong: the server's reason, its message, and the fields that it refused. */
    private static String describe(StatusRuntimeException error) {
        StringBuilder text = new StringBuilder(error.getStatus().getCode() + " " + Failure.of(error).reason + ": "
                + error.getStatus().getDescription());
        for (com.google.protobuf.Any detail : StatusProto.fromThrowable(error).getDetailsList()) {
            try {
                if (detail.is(BadRequest.class))
                    detail.unpack(BadRequest.class).getFieldViolationsList().forEach(violation ->
                            text.append("\n  ").append(violation.getField()).append(": ")
                                    .append(violation.getDescription()));
            } catch (InvalidProtocolBufferException broken) {
                text.append("\n  a detail cannot be read");
            }
        }
        return text.toString();
    }
}
