package cloudinit

import (
	"crypto/rand"
	"crypto/sha512"
	"encoding/binary"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

const (
	cryptAlphabet = "./0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
	cryptRounds   = 5000 // the number that a hash without "rounds=" means
	cryptSalt     = 16   // characters
	maxPassword   = 256  // bytes; crypt(3) takes no more than 512
)

// HashPassword returns password in the form that the password file of any Linux system has: SHA-512 crypt with a new salt
// (https://www.akkadia.org/drepper/SHA-crypt.txt).
func HashPassword(password string) (string, error) {
	switch {
	case password == "":
		return "", errdefs.Invalidf("the password is empty")
	case len(password) > maxPassword:
		return "", errdefs.Invalidf("the password has %d bytes; at most %d are possible", len(password), maxPassword)
	case strings.ContainsAny(password, "\x00\r\n"):
		return "", errdefs.Invalidf("the password has a line break or a zero byte")
	}
	var salt [cryptSalt]byte
	_, _ = rand.Read(salt[:]) // never fails: crypto/rand aborts the process instead
	for i, b := range salt {
		salt[i] = cryptAlphabet[b&63]
	}
	return sha512Crypt([]byte(password), salt[:]), nil
}

func sha512Crypt(password, salt []byte) string {
	sum := func(parts ...[]byte) []byte {
		h := sha512.New()
		for _, p := range parts {
			h.Write(p)
		}
		return h.Sum(nil)
	}
	b := sum(password, salt, password)
	parts := [][]byte{password, salt, stretch(b, len(password))}
	for n := len(password); n > 0; n >>= 1 {
		if n&1 == 1 {
			parts = append(parts, b)
		} else {
			parts = append(parts, password)
		}
	}
	a := sum(parts...)
	p := stretch(sum(repeat(password, len(password))...), len(password))
	s := stretch(sum(repeat(salt, 16+int(a[0]))...), len(salt))
	for i := range cryptRounds {
		first, last := a, p
		if i&1 == 1 {
			first, last = p, a
		}
		parts := [][]byte{first}
		if i%3 != 0 {
			parts = append(parts, s)
		}
		if i%7 != 0 {
			parts = append(parts, p)
		}
		a = sum(append(parts, last)...)
	}
	return "$6$" + string(salt) + "$" + cryptText(a)
}

// cryptText writes a sum in the order and alphabet of crypt(3).
func cryptText(sum []byte) string {
	var out strings.Builder
	write := func(x, y, z byte, characters int) {
		v := binary.BigEndian.Uint32([]byte{0, x, y, z})
		for range characters {
			out.WriteByte(cryptAlphabet[v&63])
			v >>= 6
		}
	}
	for i, at := 0, [3]int{0, 21, 42}; i < 21; i++ {
		write(sum[at[0]], sum[at[1]], sum[at[2]], 4)
		at = [3]int{at[1] + 1, at[2] + 1, at[0] + 1}
	}
	write(0, 0, sum[63], 2)
	return out.String()
}

func repeat(b []byte, n int) [][]byte {
	out := make([][]byte, n)
	for i := range out {
		out[i] = b
	}
	return out
}

// stretch returns n bytes of b, repeated as often as needed.
func stretch(b []byte, n int) []byte {
	out := make([]byte, 0, n+len(b))
	for len(out) < n {
		out = append(out, b...)
	}
	return out[:n]
}
