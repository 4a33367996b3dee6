package textui

import (
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestParseSize(t *testing.T) {
	for in, want := range map[string]int64{
		"0": 0, "4096": 4096, "512M": 512 << 20, "1G": 1 << 30, "1g": 1 << 30, "1Gi": 1 << 30, "1GiB": 1 << 30, "1GB": 1 << 30,
		"1.5G": 3 << 29, "10KiB": 10 << 10, "2T": 2 << 40, "7P": 7 << 50, "0.5K": 512, "100B": 100,
	} {
		if got, err := ParseSize(in); err != nil || got != want {
			t.Errorf("ParseSize(%q) = %d, %v; want %d", in, got, err, want)
		}
	}
	for _, in := range []string{"", "G", "-1", "1X", "1 G", "1Gx", "1.2.3G", "NaN", "Inf", "1e9", "0x10", "9223372036854775807K", "8192P", "99999999999999999999", "1I", "1iB", "+1G"} {
		if got, err := ParseSize(in); !errdefs.IsInvalid(err) {
			t.Errorf("ParseSize(%q) = %d, %v; want an invalid argument", in, got, err)
		}
	}
}

func TestFormatSize(t *testing.T) {
	for in, want := range map[int64]string{
		0: "0", 1: "1", 1023: "1023", 1024: "1K", 1536: "1.5K", 1 << 20: "1M", 512 << 20: "512M", 10 << 30: "10G", 1<<30 - 1: "1G", 1<<63 - 1: "8192P", -5: "-5",
	} {
		if got := FormatSize(in); got != want {
			t.Errorf("FormatSize(%d) = %q, want %q", in, got, want)
		}
	}
}

func FuzzParseSize(f *testing.F) {
	for _, s := range []string{"512M", "1.5G", "1GiB", "", "9223372036854775807", "0.0000001P", ".", "1..2"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := ParseSize(s)
		if err != nil {
			return
		}
		if n < 0 {
			t.Fatalf("ParseSize(%q) = %d", s, n)
		}
		again, err := ParseSize(FormatSize(n))
		if err != nil { // 8192P, the rounded largest number, is the only one that does not fit
			if n < 1<<62 {
				t.Fatalf("FormatSize(%d) = %q does not parse: %v", n, FormatSize(n), err)
			}
			return
		}
		if diff := float64(again) - float64(n); n >= 1024 && (diff > float64(n)*0.06 || -diff > float64(n)*0.06) {
			t.Fatalf("%d came back as %d", n, again)
		}
	})
}
