#!/bin/sh
# Builds one of the programs that stream an answer:  build.sh go|java|cpp|typescript FOLDER
#
# FOLDER/stream is the program. It needs protoc, Debian's packages of the language as README.md lists them (for
# typescript: Node 20 and npm), and, but for go and typescript, GOOGLEAPIS: a folder with google/rpc/status.proto and
# error_details.proto, such as a clone of github.com/googleapis/googleapis or the site-packages of Python's
# googleapis-common-protos.
set -eu
language=$1
mkdir -p "$2"
folder=$(cd "$2" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
protos=${PROTOS:-$(cd "$here/../../protos" && pwd)}

case $language in
go)
    # Debian's packages of Go are sources in a GOPATH. With modules: see README.md.
    code=$folder/src/npuserve.dev
    mkdir -p "$code" "$folder/src/stream"
    cp "$here"/go/*.go "$folder/src/stream"
    (cd "$protos" && protoc -I. --go_out="$code" --go_opt=module=npuserve.dev --go-grpc_out="$code" \
        --go-grpc_opt=module=npuserve.dev npuserve/v1/*.proto)
    (cd "$folder/src/stream" && GO111MODULE=off GOPATH="$folder:/usr/share/gocode" go build -tags debian -o "$folder/stream" .) ;;
java)
    mkdir -p "$folder/java" "$folder/classes"
    jars=$(find /usr/share/java -name 'grpc-*.jar' -o -name 'netty-*.jar' -o -name 'perfmark-*.jar' \
        -o -name opencensus-api.jar -o -name geronimo-annotation-1.3-spec.jar -o -name guava.jar -o -name protobuf.jar | tr '\n' :)
    (cd "$protos" && protoc -I. -I"$GOOGLEAPIS" --java_out="$folder/java" --grpc-java_out="$folder/java" \
        --plugin=protoc-gen-grpc-java="$(command -v protoc-gen-grpc-java || command -v grpc_java_plugin)" \
        npuserve/v1/*.proto google/rpc/status.proto google/rpc/error_details.proto)
    find "$folder/java" -name '*.java' > "$folder/sources"
    javac -proc:none -nowarn -cp "$jars" -d "$folder/classes" @"$folder/sources" "$here/java/Stream.java"
    # Debian's netty takes TLS with ALPN from OpenSSL alone, by a library whose name it does not look for.
    cp /usr/lib/*/jni/libnetty-tcnative.so "$folder/libnetty_tcnative.so"
    printf '#!/bin/sh\nexec java -Djava.library.path="%s" -cp "%s" Stream "$@"\n' "$folder" "$folder/classes:$jars" \
        > "$folder/stream"
    chmod +x "$folder/stream" ;;
cpp)
    cmake -S "$here/cpp" -B "$folder" -DPROTOS="$protos" -DGOOGLEAPIS="$GOOGLEAPIS"
    cmake --build "$folder" ;;
typescript)
    cp "$here"/typescript/* "$folder"
    (cd "$folder" && npm install --no-audit --no-fund --loglevel=error && PROTOS="$protos" npm run build)
    printf '#!/bin/sh\nexec node "%s" "$@"\n' "$folder/build/stream.js" > "$folder/stream"
    chmod +x "$folder/stream" ;;
*)
    echo "build.sh go|java|cpp|typescript FOLDER" >&2
    exit 2 ;;
esac
