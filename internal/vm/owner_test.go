package vm

import (
	"context"
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func TestOwnerReaches(t *testing.T) {
	operator, prod, dev := Owner{}, Owner{Namespace: "prod", PodUID: "1"}, Owner{Namespace: "dev"}
	for _, tt := range []struct {
		who, of Owner
		want    bool
	}{
		{operator, operator, true},
		{operator, prod, true},
		{prod, prod, true},
		{prod, Owner{Namespace: "prod", PodUID: "2"}, true},
		{prod, dev, false},
		{prod, operator, false},
	} {
		if got := tt.who.Reaches(tt.of); got != tt.want {
			t.Errorf("%+v reaches %+v: %v, want %v", tt.who, tt.of, got, tt.want)
		}
	}
}

func TestOwnerInvited(t *testing.T) {
	operator, prod := Owner{}, Owner{Namespace: "prod"}
	for _, tt := range []struct {
		who  Owner
		to   []string
		want bool
	}{
		{prod, nil, false},
		{prod, []string{""}, false},
		{prod, []string{"dev"}, false},
		{prod, []string{"dev", "prod"}, true},
		{prod, []string{Everyone}, true},
		{operator, []string{""}, false},
	} {
		if got := tt.who.Invited(tt.to); got != tt.want {
			t.Errorf("%+v invited by %q: %v, want %v", tt.who, tt.to, got, tt.want)
		}
	}
}

func TestBehalfTravelsWithTheContext(t *testing.T) {
	if got := Behalf(context.Background()); !got.Operator() {
		t.Errorf("without a word a request is on behalf of %+v, want the operator", got)
	}
	prod := Owner{Namespace: "prod", PodUID: "1"}
	if d := diff.Of(prod, Behalf(OnBehalf(t.Context(), prod))); d != "" {
		t.Errorf("on behalf of %s", d)
	}
	if a, b := prod.Qualify("db"), (Owner{}).Qualify("db"); a != "prod/db" || b != "db" {
		t.Errorf("qualified names are %q and %q", a, b)
	}
}
