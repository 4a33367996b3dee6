package vm

import (
	"strings"
	"testing"
)

func TestRestartAgain(t *testing.T) {
	rules := func(r ...RestartRule) []RestartRule { return r }
	for name, tt := range map[string]struct {
		restart Restart
		code    int
		failed  bool
		want    bool
	}{
		"always":                          {Restart{Policy: RestartAlways}, 0, false, true},
		"on failure, succeeded":           {Restart{Policy: RestartOnFailure}, 0, false, false},
		"on failure, failed":              {Restart{Policy: RestartOnFailure}, 1, true, true},
		"on failure, killed with success": {Restart{Policy: RestartOnFailure}, 0, true, true},
		"never":                           {Restart{Policy: RestartNever}, 1, true, false},
		"never, but a rule matches":       {Restart{RestartNever, rules(RestartRule{Codes: []int{3, 42}})}, 42, true, true},
		"never, no rule matches":          {Restart{RestartNever, rules(RestartRule{Codes: []int{3, 42}})}, 1, true, false},
		"none of the codes":               {Restart{RestartNever, rules(RestartRule{Not: true, Codes: []int{42}})}, 0, false, true},
		"one of the codes":                {Restart{RestartNever, rules(RestartRule{Not: true, Codes: []int{42}})}, 42, true, false},
		"the second rule":                 {Restart{RestartNever, rules(RestartRule{Codes: []int{1}}, RestartRule{Codes: []int{2}})}, 2, true, true},
		"no rule matches, on failure":     {Restart{RestartOnFailure, rules(RestartRule{Codes: []int{1}})}, 2, true, true},
	} {
		if got := tt.restart.Again(tt.code, tt.failed); got != tt.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestValidateRestart(t *testing.T) {
	spec := func(r *Restart) Spec {
		return Spec{Restart: RestartNever, Containers: []Container{{Name: "c", Image: "i", Kind: ContainerApp, Restart: r}}}
	}
	if err := spec(&Restart{RestartAlways, []RestartRule{{Codes: []int{0, 255}}}}).ValidateContainers(); err != nil {
		t.Error(err)
	}
	for want, r := range map[string]*Restart{
		"invalid restart policy": {Policy: "sometimes"},
		"exit code 256":          {RestartNever, []RestartRule{{Codes: []int{256}}}},
		"at most 20":             {RestartNever, make([]RestartRule, 21)},
		"at most 255":            {RestartNever, []RestartRule{{Codes: make([]int, 256)}}},
	} {
		if err := spec(r).ValidateContainers(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}
