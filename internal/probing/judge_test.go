package probing

import "testing"

func TestJudge(t *testing.T) {
	const u, s, w, f = Unknown, Success, Warning, Failure
	for name, tc := range map[string]struct {
		successes, failures int
		in, out             []Result
	}{
		"first success counts":              {1, 3, []Result{s}, []Result{s}},
		"failures in a row":                 {1, 3, []Result{f, f, f, f}, []Result{u, u, f, f}},
		"a success resets the count":        {1, 3, []Result{f, f, s, f, f, f}, []Result{u, u, s, u, u, f}},
		"successes in a row":                {2, 1, []Result{s, s, f, s, s}, []Result{u, s, f, u, s}},
		"a warning is a success":            {2, 2, []Result{w, s, w}, []Result{u, s, s}},
		"unknown is ignored":                {1, 2, []Result{f, u, f}, []Result{u, u, f}},
		"default threshold is one":          {0, 0, []Result{f, s}, []Result{f, s}},
		"too few successes after a failure": {3, 2, []Result{f, f, s, s, f, f}, []Result{u, f, u, u, u, f}},
	} {
		j := Judge{Successes: tc.successes, Failures: tc.failures}
		for i, r := range tc.in {
			if got := j.Take(r); got != tc.out[i] {
				t.Errorf("%s: verdict %d is %d, want %d", name, i, got, tc.out[i])
			}
		}
	}
}
