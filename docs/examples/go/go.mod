module npuserve.dev/examples/stream

go 1.19

// The generated code of protos/. npuserve.dev is a name, not an address that can be fetched.
replace npuserve.dev => ./gen
