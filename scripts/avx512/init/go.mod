module roundpipe-go/scripts/avx512/init

go 1.26
