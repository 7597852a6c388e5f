// Streams one answer and survives lost connections, dead front ends, restarts and full queues.
//
//	stream [-ca FILE] [-key FILE] [-timeout SECONDS] [-patience SECONDS] [-max-tokens N] TARGET TEXT
//
// It follows the rules of docs/clients.md, "What to do when something breaks": wait at least as long as the server says,
// resume the stream after the tokens received, never show a token twice. README.md in the folder above says how to build it.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand"
	"os"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	npuserve "npuserve.dev/npuserve/v1"
)

const (
	domain     = "npuserve.dev" // ErrorInfo.domain of npuserve: a name, not an address
	minBackoff = 50 * time.Millisecond
	maxBackoff = 5 * time.Second
)

// failure is what a call ended with. reason: the server's name of the cause; empty if a connection or a proxy broke.
// retry: the server's least time until the next call; negative if it gave none.
type failure struct {
	code   codes.Code
	reason string
	retry  time.Duration
}

func failureOf(err error) failure {
	said := status.Convert(err)
	found := failure{code: said.Code(), retry: -1}
	for _, detail := range said.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			if detail.Domain == domain {
				found.reason = detail.Reason
			}
		case *errdetails.RetryInfo:
			delay := detail.RetryDelay
			found.retry = time.Duration(delay.GetSeconds())*time.Second + time.Duration(delay.GetNanos())
		}
	}
	return found
}

func (f failure) isTransient() bool {
	if f.retry >= 0 || f.code == codes.Unavailable {
		return true
	}
	brokenConnection := f.code == codes.Internal || f.code == codes.Unknown || f.code == codes.Canceled
	return brokenConnection && f.reason == ""
}

// answer is the state of one answer across all its calls.
type answer struct {
	client   npuserve.InferenceServiceClient
	request  *npuserve.GenerateRequest
	show     func(*npuserve.StreamGenerateResponse)
	token    string // resume token; empty until known
	tokens   uint32 // received
	received bool   // a message
	failures int    // in a row
	finished bool
}

// call opens one stream and reads it to its end or failure.
func (a *answer) call(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var stream interface {
		Header() (metadata.MD, error)
		Recv() (*npuserve.StreamGenerateResponse, error)
	}
	var err error
	if a.token != "" {
		stream, err = a.client.ResumeStream(ctx, &npuserve.ResumeStreamRequest{ResumeToken: a.token, TokenOffset: a.tokens})
	} else {
		stream, err = a.client.StreamGenerate(ctx, a.request)
	}
	if err != nil {
		return err
	}
	if header, err := stream.Header(); err == nil {
		if values := header.Get("x-resume-token"); len(values) > 0 {
			a.token = values[0]
		}
	}
	for {
		message, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			if a.finished {
				return nil
			}
			return status.Error(codes.Unknown, "the stream ended without a finish")
		}
		if err != nil {
			if a.finished { // the answer is complete
				return nil
			}
			return err
		}
		if message.Offset != a.tokens {
			return status.Errorf(codes.DataLoss, "a message at token %d, %d was next", message.Offset, a.tokens)
		}
		a.tokens += message.NumTokens
		a.received = true
		if message.NumTokens > 0 {
			a.failures = 0
		}
		a.finished = message.Finish != nil
		a.show(message)
	}
}

// stream calls until the answer is complete. patience: longest time of failures in a row.
func (a *answer) stream(ctx context.Context, patience time.Duration) error {
	var failingSince time.Time
	for {
		resuming := a.token != ""
		err := a.call(ctx)
		if err == nil {
			return nil
		}
		found := failureOf(err)
		isUnknown := resuming && found.reason == "STREAM_NOT_FOUND"
		if !found.isTransient() && !(isUnknown && !a.received) || a.received && a.token == "" {
			return err
		}
		if !a.received && found.reason != "" {
			a.token = "" // the server refused the request or has no such stream: send the request again
		}
		now := time.Now()
		if a.failures == 0 {
			failingSince = now
		}
		nominal := math.Min(float64(maxBackoff), float64(minBackoff)*math.Pow(2, float64(a.failures)))
		a.failures++
		wait := math.Max(nominal*(0.5+rand.Float64()/2), float64(found.retry)*(1+rand.Float64()/4))
		next := now.Add(time.Duration(wait))
		if deadline, ok := ctx.Deadline(); ok && !next.Before(deadline) || next.Sub(failingSince) > patience {
			return err
		}
		select {
		case <-time.After(time.Duration(wait)):
		case <-ctx.Done():
			return err
		}
	}
}

// key sends an API key with each call. Without TLS anybody on the way reads it.
type key struct {
	text   string
	secure bool
}

func (k key) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + k.text}, nil
}

func (k key) RequireTransportSecurity() bool { return k.secure }

// connect opens a channel. ca: file of the certificate authorities; empty: no TLS. keyFile: file of the API key, or empty.
func connect(target, ca, keyFile string) (*grpc.ClientConn, error) {
	limits := backoff.DefaultConfig
	limits.BaseDelay, limits.MaxDelay = minBackoff, time.Second
	options := []grpc.DialOption{
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: limits, MinConnectTimeout: maxBackoff}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 10 * time.Second}),
		grpc.WithDisableRetry(),
	}
	if ca == "" {
		options = append(options, grpc.WithInsecure()) // insecure.NewCredentials() from grpc 1.34 on
	} else {
		pem, err := os.ReadFile(ca)
		if err != nil {
			return nil, err
		}
		authorities := x509.NewCertPool()
		if !authorities.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s: no certificate", ca)
		}
		options = append(options, grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: authorities})))
	}
	if keyFile != "" {
		text, err := os.ReadFile(keyFile)
		if err != nil {
			return nil, err
		}
		options = append(options, grpc.WithPerRPCCredentials(key{strings.TrimSpace(string(text)), ca != ""}))
	}
	return grpc.Dial(target, options...)
}

func run() error {
	ca := flag.String("ca", "", "file of the server's certificate authority; without it no TLS")
	keyFile := flag.String("key", "", "file of the API key")
	timeout := flag.Float64("timeout", 0, "seconds for the whole answer; 0: no limit")
	patience := flag.Float64("patience", 60, "seconds of failures in a row")
	maxTokens := flag.Uint("max-tokens", 64, "longest answer")
	flag.Parse()
	if flag.NArg() != 2 {
		return errors.New("give TARGET and TEXT")
	}
	connection, err := connect(flag.Arg(0), *ca, *keyFile)
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx := context.Background()
	if *timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(*timeout*float64(time.Second)))
		defer cancel()
	}
	limit := uint32(*maxTokens)
	a := answer{
		client: npuserve.NewInferenceServiceClient(connection),
		request: &npuserve.GenerateRequest{
			Prompt:   &npuserve.GenerateRequest_Text{Text: flag.Arg(1)},
			Stopping: &npuserve.StoppingParams{MaxTokens: &limit},
		},
		show: func(message *npuserve.StreamGenerateResponse) { fmt.Print(message.Text) },
	}
	if err := a.stream(ctx, time.Duration(*patience*float64(time.Second))); err != nil {
		return err
	}
	fmt.Println()
	return nil
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, describe(err))
		os.Exit(1)
	}
}

// describe says what went wrong: the server's reason, its message, and the fields that it refused.
func describe(err error) string {
	said, ok := status.FromError(err)
	if !ok {
		return err.Error()
	}
	text := fmt.Sprintf("%s %s: %s", said.Code(), failureOf(err).reason, said.Message())
	for _, detail := range said.Details() {
		if bad, ok := detail.(*errdetails.BadRequest); ok {
			for _, violation := range bad.FieldViolations {
				text += fmt.Sprintf("\n  %s: %s", violation.Field, violation.Description)
			}
		}
	}
	return text
}
